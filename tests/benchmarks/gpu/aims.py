"""What ours must reach: once for all ops, because they differ in few numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .contest import BOTH, COMPILED, EAGER, FORWARD, LIGER, Least

BEST = "the best peer"
GROUPED = "grouped_mm"

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

CALL = Aim({BEST: 1.0})
LAYERS = Aim({EAGER: 1.0, LIGER: 1.0, COMPILED: 0.97})


def moving_bytes(narrow: Callable[[Any], bool]) -> Aims:
    """For what is bound by memory; where *narrow*, both directions are half as fast again as Liger's."""

    def aim(shape: Any, work: str, least: Least) -> Aim | None:
        if work not in (FORWARD, BOTH):
            return None
        speed = {BEST: 1.0, LIGER: 1.5} if work == BOTH and narrow(shape) else {BEST: 1.0}
        return Aim(speed, 0.85 if least.bytes >= _LARGE else 0.0)

    return aim


def mixture(shape: Any, work: str, _: Least) -> Aim | None:
    """For a mixture of experts: against transformers' own, against Liger's, and of what the tensor cores reach."""
    if work not in (FORWARD, BOTH):
        return None
    speed = {GROUPED: 2.0 if shape.experts >= 128 else 1.1} if work == BOTH else {GROUPED: 1.0}
    return Aim(speed | {LIGER: 1.0}, 0.6 if shape.tokens >= 32768 else 0.0)


def loss_head(_shape: Any, work: str, _: Least) -> Aim | None:
    """For the loss of a language model: as fast as Liger's, with at most a tenth more time than with all logits."""
    if work not in (FORWARD, BOTH):
        return None
    return Aim({LIGER: 1.0, EAGER: 0.9} if work == BOTH else {EAGER: 0.9})
