"""From how many elements on, and up to how many, a kernel is used: other calls are the original's, faster there."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .contract import Adapter, Use
from .hookspecs import BaseKernel
from .report import Figure

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

NEVER = sys.maxsize
"""More elements than a tensor has: no call is large enough."""

TOO_SMALL, AT_NO_SIZE = "it is too small to gain", "the kernel is faster at no size"

MARGIN = 1.02
"""How many times as fast as the original a kernel must be to be used, where it is measured. The same code timed against
itself is at times a percent ahead."""


_NONE = (0,) * len(DTYPES)


@dataclass(frozen=True)
class Gains:
    """Numbers of elements of the main input, for each of `DTYPES`.

    Attributes:
        training: From how many on the kernel is used in calls whose main input requires gradients.
        inference: In all others.
        training_until: Up to how many it is used as well.
        inference_until: In all others.
    """

    training: tuple[int, ...]
    inference: tuple[int, ...]
    training_until: tuple[int, ...] = _NONE
    inference_until: tuple[int, ...] = _NONE

    def __bool__(self) -> bool:
        """Whether there is any call that is too small."""
        return any(self.training) or any(self.inference)

    def why_not(self, x: torch.Tensor) -> str:
        """What is said where *x*, the main input, is too small."""
        number = by_dtype(self.training if x.requires_grad else self.inference).get(x.dtype, 0)
        until = by_dtype(self.training_until if x.requires_grad else self.inference_until).get(x.dtype, 0)
        if number == NEVER and not until:
            return f"{AT_NO_SIZE} {'with' if x.requires_grad else 'without'} gradients"
        ends = [f"up to {until:,}"] if until else []
        ends += [f"from {number:,} on"] if number != NEVER else []
        found = f"the main input has {x.numel():,} elements, and the kernel is faster {' and '.join(ends)}"
        return f"{TOO_SMALL}: {found}"

    def to_dict(self) -> dict[str, int | None]:
        """By kind of call (``"bfloat16 training"``), ``None`` for never; empty if no call is too small."""
        found = _by_kind(self.training, self.inference) if self else {}
        return {kind: None if number == NEVER else number for kind, number in found.items()}

    def until_to_dict(self) -> dict[str, int]:
        """By kind of call, up to how many elements the kernel is used as well; without the kinds where it is not."""
        found = _by_kind(self.training_until, self.inference_until) if self else {}
        return {kind: number for kind, number in found.items() if number}


def _by_kind(training: Sequence[int], inference: Sequence[int]) -> dict[str, int]:
    return {
        f"{str(dtype).removeprefix('torch.')} {kind}": number
        for kind, numbers in (("training", training), ("inference", inference))
        for dtype, number in zip(DTYPES, numbers, strict=True)
    }


def is_about_size(reason: str) -> bool:
    """Whether *reason* is one of `Gains.why_not`."""
    return reason.startswith((TOO_SMALL, AT_NO_SIZE))


def by_dtype(numbers: Sequence[int]) -> dict[torch.dtype, int]:
    """*numbers*, one for each of `DTYPES`. A call in any other dtype is never too small."""
    return dict(zip(DTYPES, numbers, strict=True))


EVERY_SIZE = Gains(_NONE, _NONE)
TIMED = Gains((1,) * len(DTYPES), (1,) * len(DTYPES))
"""Of the replacements that are timed: they compare the size, as those in place do, and are none of them."""


def gains_of(kernel: BaseKernel, adapter: Adapter, device_type: str, work: float) -> Gains:
    """What *kernel* says, in elements of the main input.

    Args:
        kernel: Whose `gains_from` is asked.
        adapter: What it computes.
        device_type: Where.
        work: As `Proposal.work`.

    Raises:
        TypeError: If it answers with something else than a number from 0 on.
    """

    def asked(question: str, rounded: Callable[[float], int], *, gradients: bool) -> tuple[int, ...]:
        uses = [Use(adapter, device_type, dtype, gradients) for dtype in DTYPES]
        return tuple([rounded(_said(kernel, question, use) / work) for use in uses])

    return Gains(
        *(asked("gains_from", math.ceil, gradients=gradients) for gradients in (True, False)),
        *(asked("gains_until", round, gradients=gradients) for gradients in (True, False)),
    )


def measured(declared: Gains, figures: Sequence[Figure]) -> Gains | None:
    """From which size on a kernel gains.

    Args:
        declared: What the kernel says. It stands for dtypes and kinds of calls that were not measured.
        figures: What was measured.

    Returns:
        For each kind of call that was measured, the smallest size from which on all gain by `MARGIN`: *declared* if
        that is smaller and the smallest gains too, `NEVER` if the largest does not gain. Up to which size the kernel
        is used as well is as *declared*, if all gain that were measured there. ``None`` if no kind gains.
    """
    training = [(each.dtype, each.elements, each.both.gain) for each in figures if each.both is not None]
    inference = [(each.dtype, each.elements, each.forward.gain) for each in figures]
    kinds = [
        _shown(declared.training, declared.training_until, training),
        _shown(declared.inference, declared.inference_until, inference),
    ]
    shown = [ends for kind in kinds for ends in kind.values()]
    if shown and all(ends == (NEVER, 0) for ends in shown):
        return None
    said = (
        zip(declared.training, declared.training_until, strict=True),
        zip(declared.inference, declared.inference_until, strict=True),
    )
    (training_from, training_until), (inference_from, inference_until) = (
        zip(*(kind.get(dtype, ends) for dtype, ends in zip(DTYPES, each, strict=True)), strict=True)
        for kind, each in zip(kinds, said, strict=True)
    )
    return Gains(training_from, inference_from, training_until, inference_until)


def _shown(
    declared: Sequence[int], until: Sequence[int], figures: Iterable[tuple[str, int, float]]
) -> dict[torch.dtype, tuple[int, int]]:
    """By dtype, from which number of elements on and up to which *figures*, of dtype, elements and gain, gain."""
    found: dict[torch.dtype, tuple[int, int]] = {}
    for dtype, said, most in zip(DTYPES, declared, until, strict=True):
        gains: dict[int, float] = {}
        for name, elements, gain in figures:
            if f"torch.{name}" == str(dtype):
                gains[elements] = min(gain, gains.get(elements, gain))
        if not gains:
            continue
        gaining = {elements for elements, gain in gains.items() if gain >= MARGIN}
        shown_until = most if gaining.issuperset(elements for elements in gains if elements <= most) else 0
        beyond = sorted((elements for elements in gains if elements > shown_until), reverse=True)
        large = [*itertools.takewhile(gaining.__contains__, beyond)]
        least = large[-1] if large else NEVER
        if large == beyond:  # or nothing was measured there
            least = min(said, least)
        found[dtype] = (least, shown_until)
    return found


def _said(kernel: BaseKernel, question: str, use: Use) -> int:
    said: int = getattr(kernel, question)(use)
    if isinstance(said, bool) or not isinstance(said, int) or said < 0:
        raise TypeError(f"{question}() must give a number of elements, 0 or more; it gave {said!r} for {use.dtype}")
    return said
