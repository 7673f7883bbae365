"""From how many elements on a kernel is used: smaller calls are the original's, which is faster there."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True)
class Gains:
    """Numbers of elements of the main input, for each of `DTYPES`.

    Attributes:
        training: For calls whose main input requires gradients.
        inference: For all others.
    """

    training: tuple[int, ...]
    inference: tuple[int, ...]

    def __bool__(self) -> bool:
        """Whether there is any call that is too small."""
        return any(self.training) or any(self.inference)

    def why_not(self, x: torch.Tensor) -> str:
        """What is said where *x*, the main input, is too small."""
        number = by_dtype(self.training if x.requires_grad else self.inference).get(x.dtype, 0)
        if number == NEVER:
            return f"{AT_NO_SIZE} {'with' if x.requires_grad else 'without'} gradients"
        return f"{TOO_SMALL}: the main input has {x.numel():,} elements, and the kernel is faster from {number:,} on"

    def to_dict(self) -> dict[str, int | None]:
        """By kind of call (``"bfloat16 training"``), ``None`` for never; empty if no call is too small."""
        kinds = [("training", self.training), ("inference", self.inference)] if self else []
        return {
            f"{str(dtype).removeprefix('torch.')} {kind}": None if number == NEVER else number
            for kind, numbers in kinds
            for dtype, number in zip(DTYPES, numbers, strict=True)
        }


def is_about_size(reason: str) -> bool:
    """Whether *reason* is one of `Gains.why_not`."""
    return reason.startswith((TOO_SMALL, AT_NO_SIZE))


def by_dtype(numbers: Sequence[int]) -> dict[torch.dtype, int]:
    """*numbers*, one for each of `DTYPES`. A call in any other dtype is never too small."""
    return dict(zip(DTYPES, numbers, strict=True))


EVERY_SIZE = Gains((0,) * len(DTYPES), (0,) * len(DTYPES))
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
    return Gains(
        *(
            tuple([_asked(kernel, Use(adapter, device_type, dtype, gradients), work) for dtype in DTYPES])
            for gradients in (True, False)
        )
    )


def measured(declared: Gains, figures: Sequence[Figure]) -> Gains | None:
    """From which size on a kernel gains.

    Args:
        declared: What the kernel says. It stands for dtypes and kinds of calls that were not measured.
        figures: What was measured.

    Returns:
        For each kind of call that was measured, the smallest size from which on all gain by `MARGIN`: *declared* if
        that is smaller and the smallest gains too, `NEVER` if the largest does not gain. ``None`` if no kind gains.
    """
    training = [(each.dtype, each.elements, each.both.gain) for each in figures if each.both is not None]
    inference = [(each.dtype, each.elements, each.forward.gain) for each in figures]
    kinds = [_shown(declared.training, training), _shown(declared.inference, inference)]
    shown = [number for kind in kinds for number in kind.values()]
    if shown and all(number == NEVER for number in shown):
        return None
    numbers = (declared.training, declared.inference)
    return Gains(
        *(
            tuple([kind.get(dtype, number) for dtype, number in zip(DTYPES, said, strict=True)])
            for kind, said in zip(kinds, numbers, strict=True)
        )
    )


def _shown(declared: Sequence[int], figures: Iterable[tuple[str, int, float]]) -> dict[torch.dtype, int]:
    """By dtype, from which number of elements on *figures*, of dtype, elements and gain, gain."""
    found: dict[torch.dtype, int] = {}
    for dtype, said in zip(DTYPES, declared, strict=True):
        gains: dict[int, float] = {}
        for name, elements, gain in figures:
            if f"torch.{name}" == str(dtype):
                gains[elements] = min(gain, gains.get(elements, gain))
        if not gains:
            continue
        largest_first = sorted(gains, reverse=True)
        gaining = [*itertools.takewhile(lambda elements: gains[elements] >= MARGIN, largest_first)]  # noqa: B023 - used up here
        least = gaining[-1] if gaining else NEVER
        found[dtype] = min(said, least) if len(gaining) == len(gains) else least
    return found


def _asked(kernel: BaseKernel, use: Use, work: float) -> int:
    said = kernel.gains_from(use)
    if isinstance(said, bool) or not isinstance(said, int) or said < 0:
        raise TypeError(f"gains_from() must give a number of elements, 0 or more; it gave {said!r} for {use.dtype}")
    return math.ceil(said / work)
