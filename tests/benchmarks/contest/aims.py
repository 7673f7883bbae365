"""The aims that ours must reach. They are here for all ops, because they differ in few numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .problems import BOTH, COMPILED, EAGER, FORWARD, LIGER, Least

BEST = "the best peer"
GROUPED = "grouped_mm"
"""The implementation of experts that transformers uses by default."""

_LARGE = 256e6
"""Bytes from which on an aim asks for a share of the bandwidth. For fewer, the launch itself takes too much time."""


class Aim(NamedTuple):
    """What ours must reach in one work at one shape.

    Attributes:
        speed: How many times as fast as each of these peers ours must be.
        share: The share of the ceiling that ours must reach.
    """

    speed: Mapping[str, float]
    share: float = 0.0


Aims = Callable[[Any, str, Least], Aim | None]
"""Takes a shape, a work, and the least that the work needs, and returns the aim."""

_LEVEL = 0.98
"""As fast as the peer, within noise."""

CALL = Aim({BEST: _LEVEL})
LAYERS = Aim({EAGER: 1.0, LIGER: _LEVEL, COMPILED: 0.97})


def moving_bytes(_shape: Any, work: str, least: Least) -> Aim | None:
    """The aim of an op that is bound by memory."""
    if work not in (FORWARD, BOTH):
        return None
    return Aim({BEST: _LEVEL}, 0.85 if least.bytes >= _LARGE else 0.0)


def mixture(shape: Any, work: str, _: Least) -> Aim | None:
    """The aim of a mixture of experts: against transformers, Liger-Kernel, and what the tensor cores reach."""
    if work not in (FORWARD, BOTH):
        return None
    return Aim({GROUPED: _LEVEL, LIGER: _LEVEL}, 0.6 if shape.tokens >= 32768 else 0.0)


def loss_head(_shape: Any, work: str, _: Least) -> Aim | None:
    """The aim of a loss: with gradients as fast as Liger-Kernel, and 0.9 times as fast as with all logits."""
    if work not in (FORWARD, BOTH):
        return None
    return Aim({LIGER: _LEVEL, EAGER: 0.9} if work == BOTH else {EAGER: 0.9})
