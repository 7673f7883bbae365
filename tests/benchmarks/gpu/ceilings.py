"""What this very device reaches, measured in the same run: bytes copied and bfloat16 multiplications a second."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

from .contest import Least, normal
from .timing import DeviceClock
from .turns import Turn

_SIZES = (4096, 8192, 16384)


class Ceilings(NamedTuple):
    """Bytes a second, read and written ones together, and floating-point operations a second."""

    bandwidth: float
    rate: float

    def least_seconds(self, least: Least) -> float:
        """The time below which nothing can be that moves and computes so much."""
        return max(least.bytes / self.bandwidth, least.flops / self.rate)


def measure(device: torch.device, clock: DeviceClock) -> Ceilings:
    """The medians of copies of a sixteenth of the memory, and of the best size of square matrices."""
    source = torch.randn(torch.cuda.get_device_properties(device).total_memory // 64, device=device)
    target = torch.empty_like(source)
    copied = statistics.median(clock({"copy": _turn(lambda: target.copy_(source))}, 1.0)["copy"])
    moved = 2 * source.numel() * source.element_size()
    del source, target
    return Ceilings(moved / copied * 1e6, max(_rate(size, device, clock) for size in _SIZES))


def _rate(size: int, device: torch.device, clock: DeviceClock) -> float:
    a, b = normal(device, size, size), normal(device, size, size)
    took = statistics.median(clock({"matmul": _turn(lambda: a @ b)}, 1.0)["matmul"])
    return 2 * size**3 / took * 1e6


def _turn(run: object) -> Turn:
    return Turn(lambda: None, lambda _: run())
