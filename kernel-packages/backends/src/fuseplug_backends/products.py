"""Matrix products in half precision on CPUs that are slow at it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["float32_is_faster", "is_slow", "matmul"]

_ROWS = 8
"""From so many rows the product with a transposed matrix, as a linear layer has it, is faster in float32."""

_BLOCK = 1 << 11
"""Rows and columns of what is in float32 at a time: three blocks of 16 MB."""


def matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a @ b``, recording nothing for a backward, and whatever autocast says.

    Args:
        a: ``(rows, inner)``.
        b: ``(inner, columns)``, of the dtype of *a*, on its device.
        out: ``(rows, columns)``, likewise. It is rounded to once.
    """
    if not float32_is_faster(a, b):
        torch.mm(a, b, out=out)
        return
    for rows, of_rows in zip(torch.split(a, _BLOCK), torch.split(out, _BLOCK), strict=True):
        for columns, block in zip(torch.split(b, _BLOCK, 1), torch.split(of_rows, _BLOCK, 1), strict=True):
            total = torch.zeros_like(block, dtype=torch.float32, memory_format=torch.contiguous_format)
            for x, y in zip(torch.split(rows, _BLOCK, 1), torch.split(columns, _BLOCK), strict=True):
                total.addmm_(x.float(), y.float())
            block.copy_(total)


def float32_is_faster(a: Tensor, b: Tensor) -> bool:
    """Whether ``a @ b`` is in half precision, and faster by way of float32, as `matmul` computes it then.

    On one core of an AMD EPYC with AVX2, torch 2.13, in ms, in bfloat16 and by way of float32: 256 rows times a matrix
    of 4096 × 1024 take 7650 and 67, times a transposed one of 1024 × 4096 387 and 69; one row takes 29 and 4, and 1.6
    and 10.
    """
    return is_slow(a.dtype, a.device.type) and (len(a) >= _ROWS or b.stride(-2) != 1)


def is_slow(dtype: torch.dtype, device_type: str) -> bool:
    """Whether torch multiplies matrices of *dtype* there in a plain loop: on x86, half precision without AVX-512."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and device_type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
