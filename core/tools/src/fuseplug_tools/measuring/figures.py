"""The measured times, and the sizes from which on a kernel gains according to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fuseplug.patching.gains import NEVER, Ends, Gains, by_dtype

MARGIN = 1.02
"""How many times as fast as the original a measured kernel must be to be used. Code that is timed against itself is at
times a percent ahead."""


class Timing(NamedTuple):
    """The times of a kernel and its original in one call.

    Attributes:
        original: The median of the original, in microseconds.
        kernel: The median of the kernel, in microseconds.
        gain: How many times as fast the kernel is: the median of the ratios of all turns.
    """

    original: float
    kernel: float
    gain: float


@dataclass(frozen=True)
class Figure:
    """The times of one call that the model made.

    Attributes:
        shape: The shape of the main input.
        dtype: The dtype of the main input, such as ``"bfloat16"``.
        forward: The times of the forward without gradients.
        both: The times of forward and backward; ``None`` if only the forward was timed.
    """

    shape: tuple[int, ...]
    dtype: str
    forward: Timing
    both: Timing | None = None

    @property
    def elements(self) -> int:
        """How many elements the main input has."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        both = "" if self.both is None else f", × {self.both.gain:.2f} forward and backward"
        shape = " × ".join(map(str, self.shape)) or "1"
        return f"{shape}, {self.dtype}: × {self.forward.gain:.2f} forward{both}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "forward, µs": self.forward._asdict(),
            "forward and backward, µs": None if self.both is None else self.both._asdict(),
        }


def measured(declared: Gains, figures: Sequence[Figure]) -> Gains | None:
    """Find the sizes from which on a kernel gains.

    Args:
        declared: The sizes that the kernel declares. They stand for dtypes and kinds of calls that were not measured.
        figures: The measured calls.

    Returns:
        For each kind of call that was measured, the smallest size from which on all measured calls gain by `MARGIN`. If
        all gain, a smaller size in *declared* stands; if the largest does not, the size is `NEVER`. The size up to
        which the kernel is used as well stands as *declared*, if all calls measured there gain. ``None`` if no kind
        gains.
    """
    training = [(figure.dtype, figure.elements, figure.both.gain) for figure in figures if figure.both is not None]
    inference = [(figure.dtype, figure.elements, figure.forward.gain) for figure in figures]
    shown = _shown(declared.training, training), _shown(declared.inference, inference)
    if any(shown) and all(ends == Ends(NEVER) for of_kind in shown for ends in of_kind.values()):
        return None
    kinds = zip((declared.training, declared.inference), shown, strict=True)
    return Gains(*(tuple((by_dtype(of_kernel) | of_kind).values()) for of_kernel, of_kind in kinds))


def _shown(declared: Sequence[Ends], figures: Sequence[tuple[str, int, float]]) -> dict[torch.dtype, Ends]:
    """The sizes that *figures* (dtype, elements, gain) show, for each dtype that was measured."""
    shown: dict[torch.dtype, Ends] = {}
    for dtype, ends in by_dtype(declared).items():
        gains: dict[int, float] = {}
        for name, elements, gain in figures:
            if f"torch.{name}" == str(dtype):
                gains[elements] = min(gain, gains.get(elements, gain))
        if not gains:
            continue
        gaining = {elements for elements, gain in gains.items() if gain >= MARGIN}
        until = ends.until if gaining.issuperset(elements for elements in gains if elements <= ends.until) else 0
        beyond = sorted((elements for elements in gains if elements > until), reverse=True)
        large = [*itertools.takewhile(gaining.__contains__, beyond)]
        least = large[-1] if large else NEVER
        if large == beyond:  # all gain, or nothing was measured there
            least = min(ends.least, least)
        shown[dtype] = Ends(least, until)
    return shown
