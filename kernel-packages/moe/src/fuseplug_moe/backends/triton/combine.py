"""Adds up the rows of each token's slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuseplug_backends.triton import cached_launches, operation

from . import tiles

_COLUMNS = 1024
_SLOTS = 8
"""The size of a tile: in bfloat16, four warps read sixteen bytes a thread, from the rows of eight slots at once."""


def _results(rows: Tensor, index: Tensor, weights: Tensor | None, experts: int, dtype: torch.dtype) -> Tensor:
    del weights, experts
    return rows.new_empty(index.shape[0], rows.shape[1], dtype=dtype)


@operation(
    "fuseplug_moe::combine(Tensor rows, Tensor index, Tensor? weights, SymInt experts, ScalarType dtype) -> Tensor",
    _results,
)
def combine(out: Tensor, rows: Tensor, index: Tensor, weights: Tensor | None, experts: int, dtype: torch.dtype) -> None:
    """The weighted sum of the slots of each token, in float32 and always in the same order.

    Args:
        out: ``(tokens, hidden)`` in *dtype*.
        rows: ``(slots, hidden)`` in the order of the slots, contiguous. Rows of experts elsewhere are not read.
        index: ``(tokens, k)``, contiguous, the expert of each slot.
        weights: ``(tokens, k)``, contiguous; without weights, the rows are added.
        experts: The number of experts.
        dtype: The dtype of the result.
    """
    del dtype
    tokens, width = out.shape
    if not out.numel():
        return
    k = index.shape[1]
    block = min(_COLUMNS, tiles.power_of_two(width))
    _combine[(tokens, -(-width // block))](
        out, rows, index, weights, experts, width, K=k, BLOCK=block, SLOTS=min(_SLOTS, tiles.power_of_two(k))
    )


@cached_launches
@triton.jit
def _combine(out, rows, index, weights, experts, width, K: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, K, SLOTS):
        place = first + tl.arange(0, SLOTS)
        slot = token * K + place
        expert = tl.load(index + slot, mask=place < K, other=experts)
        here = (expert >= 0) & (expert < experts)
        mask = here[:, None] & (column < width)[None, :]
        read = tl.load(rows + slot[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            read *= tl.load(weights + slot, mask=here, other=0.0).to(tl.float32)[:, None]
        total += tl.sum(read, 0)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


def _backward_results(
    grad: Tensor, rows: Tensor, index: Tensor, weights: Tensor, experts: int
) -> tuple[Tensor, Tensor]:
    del grad, index, experts
    return torch.empty_like(rows), torch.empty_like(weights)


@operation(
    "fuseplug_moe::combine_backward(Tensor grad, Tensor rows, Tensor index, Tensor weights, SymInt experts)"
    " -> (Tensor, Tensor)",
    _backward_results,
)
def combine_backward(
    results: tuple[Tensor, Tensor], grad: Tensor, rows: Tensor, index: Tensor, weights: Tensor, experts: int
) -> None:
    """The gradients of the rows and the weights of `combine`: zero for experts elsewhere.

    Args:
        results: The gradients, like *rows* and like *weights*.
        grad: ``(tokens, hidden)``, contiguous.
        rows: As for `combine`.
        index: As for `combine`.
        weights: As for `combine`.
        experts: The number of experts.
    """
    of_rows, of_weights = results
    slots, width = rows.shape
    if not rows.numel():
        return
    block = min(_COLUMNS, tiles.power_of_two(width))
    _combine_backward[(slots,)](
        of_rows, of_weights, grad, rows, index, weights, experts, width, K=index.shape[1], BLOCK=block
    )


@cached_launches
@triton.jit
def _combine_backward(
    of_rows, of_weights, grad, rows, index, weights, experts, width, K: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    expert = tl.load(index + slot)
    here = (expert >= 0) & (expert < experts)
    read = tl.where(here, width, 0)
    weight = tl.load(weights + slot).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        upstream = tl.load(grad + slot // K * width + column, mask=column < read, other=0.0).to(tl.float32)
        sums += upstream * tl.load(rows + slot * width + column, mask=column < read, other=0.0).to(tl.float32)
        of_row = tl.where(here, weight * upstream, 0.0).to(of_rows.dtype.element_ty)
        tl.store(of_rows + slot * width + column, of_row, mask=column < width)
    tl.store(of_weights + slot, tl.sum(sums, 0).to(of_weights.dtype.element_ty))
