"""From how many elements on, and up to how many, a kernel is used: other calls are the original's, faster there."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from fuseplug_verify import Adapter

from ..contract import Use
from ..hookspecs import BaseKernel

T = TypeVar("T")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

NEVER = sys.maxsize
"""More elements than a tensor has: no call is large enough."""


class Ends(NamedTuple):
    """For which numbers of elements of the main input a kernel is used.

    Attributes:
        least: From how many on.
        until: Up to how many as well.
    """

    least: int = 0
    until: int = 0


_NEVER = Ends(NEVER)


@dataclass(frozen=True)
class Gains:
    """For which numbers of elements of the main input a kernel is used, for each of `DTYPES`.

    Attributes:
        training: In calls whose main input requires gradients.
        inference: In all others.
    """

    training: tuple[Ends, ...]
    inference: tuple[Ends, ...]

    def __bool__(self) -> bool:
        """Whether there is any call that is too small."""
        return any(ends.least for ends in self.training + self.inference)

    @property
    def smallest(self) -> int:
        """Below how many elements every call is too small; 0 if the smallest are not."""
        ends = self.training + self.inference
        return 0 if any(end.until for end in ends) else min(end.least for end in ends)

    def reaches(self, x: torch.Tensor) -> bool:
        """Whether a main input of as many elements as *x* is large enough in any kind of call."""
        return any(x.numel() >= ends.least or x.numel() <= ends.until for ends in self.training + self.inference)

    def why_not(self, x: torch.Tensor) -> str:
        """What is said where *x*, the main input, is too small."""
        ends = by_dtype(self.training if x.requires_grad else self.inference).get(x.dtype, Ends())
        if ends == _NEVER:
            return f"the kernel is faster at no size {'with' if x.requires_grad else 'without'} gradients"
        sizes = [f"up to {ends.until:,}"] if ends.until else []
        sizes += [f"from {ends.least:,} on"] if ends.least != NEVER else []
        has = f"the main input has {x.numel():,} elements, and the kernel is faster {' and '.join(sizes)}"
        return f"it is too small to gain: {has}"

    def to_dict(self) -> dict[str, int | None]:
        """By kind of call (``"bfloat16 training"``), ``None`` for never; empty if no call is too small."""
        return {kind: None if ends.least == NEVER else ends.least for kind, ends in self._by_kind()}

    def until_to_dict(self) -> dict[str, int]:
        """By kind of call, up to how many elements the kernel is used as well; without the kinds where it is not."""
        return {kind: ends.until for kind, ends in self._by_kind() if ends.until}

    def _by_kind(self) -> Iterator[tuple[str, Ends]]:
        kinds = {"training": self.training, "inference": self.inference} if self else {}
        for kind, of_kind in kinds.items():
            for dtype, ends in by_dtype(of_kind).items():
                yield f"{str(dtype).removeprefix('torch.')} {kind}", ends


def by_dtype(values: Sequence[T]) -> dict[torch.dtype, T]:
    """*values*, one for each of `DTYPES`. A call in any other dtype is never too small."""
    return dict(zip(DTYPES, values, strict=True))


EVERY_SIZE = Gains((Ends(),) * len(DTYPES), (Ends(),) * len(DTYPES))
TIMED = Gains((Ends(1),) * len(DTYPES), (Ends(1),) * len(DTYPES))
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

    def ends(use: Use) -> Ends:
        least, until = _elements(kernel, "gains_from", use), _elements(kernel, "gains_until", use)
        return Ends(math.ceil(least / work), round(until / work))

    def of_kind(*, gradients: bool) -> tuple[Ends, ...]:
        return tuple([ends(Use(adapter, device_type, dtype, gradients=gradients)) for dtype in DTYPES])

    return Gains(training=of_kind(gradients=True), inference=of_kind(gradients=False))


def _elements(kernel: BaseKernel, question: str, use: Use) -> int:
    elements: int = getattr(kernel, question)(use)
    if isinstance(elements, bool) or not isinstance(elements, int) or elements < 0:
        raise TypeError(f"{question}() must give a number of elements, 0 or more; it gave {elements!r} for {use.dtype}")
    return elements
