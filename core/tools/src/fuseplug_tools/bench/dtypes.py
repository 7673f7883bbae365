"""Whether a dtype is worth timing here: a CPU without instructions for bfloat16 takes dozens of times as long."""

from __future__ import annotations

import functools
import time

import torch

_MANY = 4.0
"""An emulated matmul takes more than this many times as long as one in float32. One in hardware takes less time."""


@functools.cache
def emulates_bfloat16() -> bool:
    """Whether the CPU of this machine multiplies matrices in bfloat16 without instructions for it."""
    return _matmul_seconds(torch.bfloat16) > _MANY * _matmul_seconds(torch.float32)


def _matmul_seconds(dtype: torch.dtype) -> float:
    matrix, seconds = torch.ones(512, 512, dtype=dtype, device="cpu"), []
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
