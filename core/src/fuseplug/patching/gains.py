"""The numbers of elements at which a kernel is used. At all others, the original is faster and computes the call."""

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
"""More elements than any tensor has, so that no call is large enough."""


class Ends(NamedTuple):
    """The numbers of elements of the main input at which a kernel is used.

    Attributes:
        least: The kernel is used from this number on.
        until: The kernel is also used up to this number.
    """

    least: int = 0
    until: int = 0


_NEVER = Ends(NEVER)


@dataclass(frozen=True)
class Gains:
    """The numbers of elements of the main input at which a kernel is used, for each of `DTYPES`.

    Attributes:
        training: For calls whose main input requires gradients.
        inference: For all other calls.
    """

    training: tuple[Ends, ...]
    inference: tuple[Ends, ...]

    def __bool__(self) -> bool:
        """Whether any call is too small."""
        return any(ends.least for ends in self.training + self.inference)

    @property
    def smallest(self) -> int:
        """The number of elements below which every call is too small; 0 if the smallest calls are not too small."""
        ends = self.training + self.inference
        return 0 if any(end.until for end in ends) else min(end.least for end in ends)

    def reaches(self, x: torch.Tensor) -> bool:
        """Whether the kernel is used, in any kind of call, for a main input with as many elements as *x*."""
        return any(x.numel() >= ends.least or x.numel() <= ends.until for ends in self.training + self.inference)

    def why_not(self, x: torch.Tensor) -> str:
        """The reason to report when *x*, the main input, is too small."""
        ends = by_dtype(self.training if x.requires_grad else self.inference).get(x.dtype, Ends())
        if ends == _NEVER:
            return f"the kernel is faster at no size {'with' if x.requires_grad else 'without'} gradients"
        sizes = [f"up to {ends.until:,}"] if ends.until else []
        sizes += [f"from {ends.least:,} on"] if ends.least != NEVER else []
        has = f"the main input has {x.numel():,} elements, and the kernel is faster {' and '.join(sizes)}"
        return f"it is too small to gain: {has}"

    def to_dict(self) -> dict[str, int | None]:
        """`Ends.least` by kind of call (``"bfloat16 training"``), ``None`` for never; empty if no call is too small."""
        return {kind: None if ends.least == NEVER else ends.least for kind, ends in self._by_kind()}

    def until_to_dict(self) -> dict[str, int]:
        """`Ends.until` by kind of call, without the kinds that have none."""
        return {kind: ends.until for kind, ends in self._by_kind() if ends.until}

    def _by_kind(self) -> Iterator[tuple[str, Ends]]:
        kinds = {"training": self.training, "inference": self.inference} if self else {}
        for kind, of_kind in kinds.items():
            for dtype, ends in by_dtype(of_kind).items():
                yield f"{str(dtype).removeprefix('torch.')} {kind}", ends


def by_dtype(values: Sequence[T]) -> dict[torch.dtype, T]:
    """*values*, one for each of `DTYPES`, by dtype. A call in any other dtype is never too small."""
    return dict(zip(DTYPES, values, strict=True))


EVERY_SIZE = Gains((Ends(),) * len(DTYPES), (Ends(),) * len(DTYPES))
TIMED = Gains((Ends(1),) * len(DTYPES), (Ends(1),) * len(DTYPES))
"""For replacements that are only timed: they compare sizes as installed ones do, but never call them too small.

For these sizes, `replacement` makes a separate object and never returns an installed one.
"""


def gains_of(kernel: BaseKernel, adapter: Adapter, device_type: str, work: float) -> Gains:
    """The sizes that *kernel* declares, in elements of the main input.

    Args:
        kernel: The kernel whose `gains_from` and `gains_until` are asked.
        adapter: The variant that the kernel computes.
        device_type: Where the kernel runs.
        work: As in `Proposal.work`.

    Raises:
        TypeError: If the kernel answers with anything but an integer of 0 or more.
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
