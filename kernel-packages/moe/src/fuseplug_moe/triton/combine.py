"""From the rows of its slots to each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuseplug.triton import operation

from . import tiles

_COLUMNS = 1024
_SLOTS = 8
"""Of a tile: four warps read sixteen bytes a thread in bfloat16, and the rows of eight slots are on their way at once."""


def _results(rows: Tensor, index: Tensor, weights: Tensor | None, experts: int, dtype: torch.dtype) -> Tensor:
    del weights, experts
    return rows.new_empty(index.shape[0], rows.shape[1], dtype=dtype)


@operation(
    "fuseplug_moe::combine(Tensor rows, Tensor index, Tensor? weights, SymInt experts, ScalarType dtype) -> Tensor",
    _results,
)
def combine(
    out: Tensor, rows: Tensor, index: Tensor, weights: Tensor | None, experts: int, dtype: torch.dtype
) -> None:
    """The weighted sum of the slots of each token, in float32 and always in the same order.

    Args:
        out: ``(tokens, hidden)`` in *dtype*.
        rows: ``(slots, hidden)`` in the order of the slots, contiguous. Rows of experts elsewhere are not read.
        index: ``(tokens, k)``, contiguous, the expert of each slot.
        weights: ``(tokens, k)``, contiguous; without them rows are added.
        experts: How many there are.
        dtype: Of the result.
    """
    del dtype
    tokens, width = out.shape
    if not out.numel():
        return
    k = index.shape[1]
    block = min(_COLUMNS, tiles.power_of_two(width))
    _combine[(tokens, -(-width // block))](
        out, rows, index, weights, experts, k, width, BLOCK=block, SLOTS=min(_SLOTS, tiles.power_of_two(k))
    )


@triton.jit
def _combine(out, rows, index, weights, experts, k, width, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, k, SLOTS):
        place = first + tl.arange(0, SLOTS)
        slot = token * k + place
        expert = tl.load(index + slot, mask=place < k, other=experts)
        here = (expert >= 0) & (expert < experts)
        mask = here[:, None] & (column < width)[None, :]
        read = tl.load(rows + slot[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            read *= tl.load(weights + slot, mask=here, other=0.0).to(tl.float32)[:, None]
        total += tl.sum(read, 0)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)
