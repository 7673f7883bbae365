"""The steps between a logit and the loss, folded: a factor, or a factor, a tanh and another factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..reference import Step

_LARGEST = 1e30
"""Of a factor, and of its inverse: beyond, its products with logits may leave float32."""


class Folded(NamedTuple):
    """What becomes of a logit: ``outer * tanh(inner * z)`` if it is *capped*, else ``outer * z``."""

    inner: float
    outer: float
    capped: bool


def folded(steps: Sequence[Step]) -> Folded | None:
    """Fold *steps*; ``None`` if they are more than `Folded` can say.

    The factors are multiplied in float64, so a kernel that computes in float32 rounds no more often than the steps do.
    """
    inner, outer, capped = 1.0, 1.0, False
    for kind, number in steps:
        if kind == "mul":
            outer *= number
        elif kind == "div":
            outer /= number
        elif kind == "tanh" and not capped:
            inner, outer, capped = outer, 1.0, True
        elif kind != "float":
            return None
    usable = all(1 / _LARGEST <= abs(factor) <= _LARGEST for factor in (inner, outer))
    return Folded(inner, outer, capped) if usable else None
