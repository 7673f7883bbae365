"""What ours must reach: once for all ops, because they differ in few numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .problems import BOTH, COMPILED, EAGER, FORWARD, LIGER, Least

BEST = "the best peer"
GROUPED = "grouped_mm"
"""What transformers takes if nothing else is asked for."""

_LARGE = 256e6
"""Bytes from which a share of the bandwidth is asked for: below, a launch's own microseconds take too much of it."""


class Aim(NamedTuple):
    """What is asked of one work at one shape.

    Attributes:
        speed: How many times that of each of these peers.
        share: Of the ceiling.
    """

    speed: Mapping[str, float]
    share: float = 0.0


Aims = Callable[[Any, str, Least], Aim | None]
"""What is asked, by shape, work, and what the work cannot do with less of."""

_LEVEL = 0.98
"""As fast as another, but for noise."""

CALL = Aim({BEST: _LEVEL})
LAYERS = Aim({EAGER: 1.0, LIGER: _LEVEL, COMPILED: 0.97})


def moving_bytes(_shape: Any, work: str, least: Least) -> Aim | None:
    """For what is bound by memory."""
    if work not in (FORWARD, BOTH):
        return None
    return Aim({BEST: _LEVEL}, 0.85 if least.bytes >= _LARGE else 0.0)


def mixture(shape: Any, work: str, _: Least) -> Aim | None:
    """For a mixture of experts: against transformers' own, against Liger's, and of what the tensor cores reach."""
    if work not in (FORWARD, BOTH):
        return None
    return Aim({GROUPED: _LEVEL, LIGER: _LEVEL}, 0.6 if shape.tokens >= 32768 else 0.0)


def loss_head(_shape: Any, work: str, _: Least) -> Aim | None:
    """For the loss of a language model: as fast as Liger's, with at most a tenth more time than with all logits."""
    if work not in (FORWARD, BOTH):
        return None
    return Aim({LIGER: _LEVEL, EAGER: 0.9} if work == BOTH else {EAGER: 0.9})
