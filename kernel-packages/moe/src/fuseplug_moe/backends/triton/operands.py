"""The matrices of all experts as kernels take them: addresses and strides."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Matrices(NamedTuple):
    """One matrix ``(rows, columns)`` for each expert, as arguments of a kernel.

    Attributes:
        data: The matrices of all experts, or their addresses.
        expert: The stride from one matrix to the next; 0 for addresses.
        row: The stride of rows.
        column: The stride of columns.
        alignment: The number of bytes, up to sixteen, of which all addresses are multiples; 0 without addresses.
    """

    data: Tensor
    expert: int
    row: int
    column: int
    alignment: int


def matrices(weights: Sequence[Tensor], *, transposed: bool) -> Matrices:
    """The `Matrices` of one tensor of three dimensions, or one for each expert; if *transposed*, rows come last."""
    first = weights[0]
    *_, row, column = first.stride()
    if transposed:
        row, column = column, row
    if first.dim() == 3:
        return Matrices(first, first.stride(0), row, column, 0)
    table, alignment = _addresses(tuple(map(Tensor.data_ptr, weights)), first.device)
    return Matrices(table, 0, row, column, alignment)


@functools.lru_cache(maxsize=4096)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """The addresses as a tensor on the device, and their alignment."""
    # The host waits for this copy, once for each layer: a later call may run on another stream, which would not.
    return torch.tensor(pointers, dtype=torch.int64, device=device), math.gcd(16, *pointers)


@triton.jit
def matrix(data, expert, stride, like, ALIGNMENT: tl.constexpr):
    """A pointer to the matrix of *expert*, whose elements have the dtype of those that *like* points to."""
    if ALIGNMENT > 0:
        start = tl.multiple_of(tl.load(data + expert).to(like.dtype), ALIGNMENT)
    else:
        start = data + expert.to(tl.int64) * stride
    return start


@triton.jit
def product(
    total,
    left,
    right,
    terms,
    depth,
    stride,
    right_mask,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Add the product of rows and a matrix to *total*.

    Args:
        total: ``(HEIGHT, WIDTH)`` in float32.
        left: ``(HEIGHT, 1)`` pointers to contiguous rows of *depth* elements. All rows may be read.
        right: ``(1, WIDTH)`` pointers to columns.
        terms: How many elements of a row are multiplied: *depth*, or 0.
        depth: How many elements a row has.
        stride: The stride from one element of a column to the next.
        right_mask: ``(1, WIDTH)``, which columns exist.
        DEPTH: How many terms are added at once.
        EVEN: Whether *DEPTH* divides *depth*, and all columns exist.
    """
    for start in range(0, terms, DEPTH):
        at = start + tl.arange(0, DEPTH)
        if EVEN:
            a = tl.load(left + at[None, :])
            b = tl.load(right + at[:, None] * stride)
        else:
            a = tl.load(left + at[None, :], mask=at[None, :] < depth, other=0.0)
            b = tl.load(right + at[:, None] * stride, mask=(at[:, None] < depth) & right_mask, other=0.0)
        total = dot(a, b, total)
    return total


_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, total):
    """Add the product of two tiles to *total*, never in TF32."""
    if _INTERPRETED:
        # Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
