"""Matrix products in half precision on CPUs that are slow at them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["float32_is_faster", "is_slow", "matmul"]

_ROWS = 8
"""From this number of rows on, a product with a transposed matrix, as in a linear layer, is faster in float32."""

_BLOCK = 1 << 11
"""Rows and columns of the blocks that are in float32 at a time: three blocks of 16 MB."""


def matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute ``out = a @ b``, not recorded for a backward, and regardless of autocast.

    Args:
        a: ``(rows, inner)``.
        b: ``(inner, columns)``, with the dtype and device of *a*.
        out: ``(rows, columns)``, likewise. Each element is rounded to its dtype once.
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
    """Whether ``a @ b`` is in half precision and faster by way of float32, which `matmul` then uses.

    On one core of an AMD EPYC with AVX2, torch 2.13, in bfloat16 and by way of float32: 256 rows times a matrix of
    4096 × 1024 take 7650 ms and 67 ms; times a transposed matrix of 1024 × 4096, they take 387 ms and 69 ms. One row
    takes 29 ms and 4 ms; with the transposed matrix, 1.6 ms and 10 ms.
    """
    return is_slow(a.dtype, a.device.type) and (len(a) >= _ROWS or b.stride(-2) != 1)


def is_slow(dtype: torch.dtype, device_type: str) -> bool:
    """Whether torch multiplies matrices of *dtype* in a plain loop: on x86, half precision without AVX-512."""
    return dtype.itemsize == 2 and device_type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
