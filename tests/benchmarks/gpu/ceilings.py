"""The ceilings of this device, measured in the same run: bytes copied and bfloat16 multiplications per second."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..contest.problems import Kind, Least, normal
from ..contest.timing import DeviceClock
from ..contest.turns import Turn

_SIZES = (4096, 8192, 16384)
_PATIENCE = 1.0
"""Seconds for each ceiling and size."""


class Ceilings(NamedTuple):
    """Bytes per second, read and written ones together, and floating-point operations per second."""

    bandwidth: float
    rate: float

    def least_seconds(self, least: Least) -> float:
        """The shortest time in which this device can move the bytes and compute the operations of *least*."""
        return max(least.bytes / self.bandwidth, least.flops / self.rate)


def measure(kind: Kind, clock: DeviceClock) -> Ceilings:
    """The medians for a copy of a sixteenth of the memory, and for the best size of square matrices."""
    return Ceilings(_bandwidth(kind, clock), max(_rate(size, kind, clock) for size in _SIZES))


def _bandwidth(kind: Kind, clock: DeviceClock) -> float:
    size = torch.cuda.get_device_properties(kind.device).total_memory // 16
    source = normal(kind, size // kind.dtype.itemsize)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), clock)


def _rate(size: int, kind: Kind, clock: DeviceClock) -> float:
    a, b = normal(kind, size, size), normal(kind, size, size)
    return 2 * size**3 / _seconds(lambda: a @ b, clock)


def _seconds(run: Callable[[], object], clock: DeviceClock) -> float:
    return 1e-6 * statistics.median(clock({"": Turn(lambda: None, lambda _: run())}, _PATIENCE)[""])
