"""Folds the steps between a logit and the loss into one factor, or into a factor, a tanh and another factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..reference import Step

_LARGEST = 1e30
"""The largest factor or inverse of a factor. Beyond it, products with logits may leave the range of float32."""


class Folded(NamedTuple):
    """The folded steps of a logit z: ``outer * tanh(inner * z)`` if *capped*, else ``outer * z``."""

    inner: float
    outer: float
    capped: bool


def folded(steps: Sequence[Step]) -> Folded | None:
    """Fold *steps*; ``None`` if `Folded` cannot express them.

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
