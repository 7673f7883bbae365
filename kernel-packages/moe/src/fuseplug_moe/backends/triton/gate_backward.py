"""The gradient of the gate from that of the weighted sum: everything in between stays in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuseplug_backends.triton import cached_launches, operation
from fuseplug_backends.triton.activations import clamped_up, gate_factor

from ...reference import GATES
from . import tiles
from .gated import SCHEMA, apart
from .operands import matrices, matrix, product
from .project import place, tile_rows


def _backward_results(_grad: Tensor, before: Tensor, weights: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, layout, _activation, _limit, _alpha = arguments
    slots, columns = before.shape
    width = columns if layout == "ungated" else columns // 2
    return torch.empty_like(before), before.new_empty(slots, width), torch.empty_like(weights)


@operation(
    "fuseplug_moe::gate_backward(Tensor grad, Tensor before, Tensor weights, Tensor index, Tensor route, Tensor[] down,"
    f" Tensor? down_bias, SymInt experts, bool transposed, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _backward_results,
)
def gate_backward(
    results: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    before: Tensor,
    weights: Tensor,
    index: Tensor,
    route: Tensor,
    down: Sequence[Tensor],
    down_bias: Tensor | None,
    experts: int,
    transposed: bool,
    layout: str,
    activation: str,
    limit: float,
    alpha: float,
) -> None:
    """Compute the gradient of gate and up, before the activation, from the gradient of the weighted sum.

    The output of the second projection is not needed. Its product with the gradient, which is the gradient of the
    weight, equals the product of the projection's input with the gradient times the transposed matrix. So neither the
    output nor the input is kept.

    Args:
        results: The gradient of *before*; the input of the second projection times the weight, ``(slots, inner)``,
            which with *grad* gives the gradient of *down*; and the gradient of *weights*.
        grad: ``(tokens, hidden)``, contiguous, in the dtype of the experts.
        before: The gate and up that `project_gated` kept.
        weights: ``(tokens, k)``, contiguous, the routing weights.
        index: ``(tokens, k)``, contiguous, the expert of each slot.
        route: The route that `sort` made.
        down: ``(experts, hidden, inner)``, or that many matrices.
        down_bias: ``(experts, hidden)``.
        experts: The number of experts.
        transposed: Whether the last two dimensions of *down* are swapped.
        layout: As for `project_gated`.
        activation: As for `project_gated`.
        limit: As for `project_gated`.
        alpha: As for `project_gated`.
    """
    of_before, weighted, of_weights = results
    slots, width = weighted.shape
    k = weights.shape[1]
    if not slots:
        return
    depth, itemsize = grad.shape[1], grad.element_size()
    shape = tiles.product(tiles.height(slots, experts), min(width, 128), depth, itemsize, grad.device)
    right = matrices(down, transposed=transposed)
    row = GATES[activation]
    across = -(-width // shape.width)
    parts = grad.new_empty(slots, across, dtype=torch.float32)
    _gate_backward[(tiles.tiles(slots, experts, shape.height) * across,)](
        of_before,
        weighted,
        parts,
        grad,
        before,
        weights,
        route,
        right.data,
        slots,
        experts,
        depth,
        width,
        right.expert,
        right.row,
        right.column,
        limit,
        row.row.steepness(alpha),
        K=k,
        ALIGNMENT=right.alignment,
        LAYOUT=layout,
        FORMULA=row.row.formula,
        CLAMP=row.clamp,
        OFFSET=row.offset,
        **shape.compiled_in(depth, width, itemsize),
    )
    block = 16
    _weights_backward[(-(-slots // block),)](
        of_weights,
        parts,
        grad,
        index,
        down_bias,
        slots,
        experts,
        depth,
        across,
        K=k,
        BLOCK=block,
        PARTS=tiles.power_of_two(across),
        DEPTH=min(256, tiles.power_of_two(depth)),
    )


@cached_launches
@triton.jit(do_not_specialize=["slots"])
def _gate_backward(
    of_before,
    weighted,
    parts,
    grad,
    before,
    weights,
    route,
    down,
    slots,
    experts,
    depth,
    width,
    stride_expert,
    stride_row,
    stride_column,
    limit,
    alpha,
    K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    LAYOUT: tl.constexpr,
    FORMULA: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    across = tl.cdiv(width, WIDTH)
    tile, part = place(tl.program_id(0), tl.num_programs(0) // across, across, GROUP)
    expert, first, end = tile_rows(route, slots, experts, tile)
    if (first >= end) | (expert == experts):
        return
    column = part * WIDTH + tl.arange(0, WIDTH)
    row = first + tl.arange(0, HEIGHT)
    slot = tl.load(route + row, mask=row < end, other=0)
    inner = product(
        tl.zeros((HEIGHT, WIDTH), tl.float32),
        grad + (slot // K).to(tl.int64)[:, None] * depth,
        matrix(down, expert, stride_expert, grad, ALIGNMENT) + column[None, :] * stride_column,
        depth,
        depth,
        stride_row,
        column[None, :] < width,
        DEPTH,
        EVEN,
    )
    weight = tl.load(weights + slot).to(tl.float32)[:, None]
    places = (of_before, weighted, before)
    start = part * WIDTH
    sums = tl.zeros((HEIGHT,), tl.float32)
    # Piece by piece: the registers do not hold all values of a wide tile.
    if WIDTH <= _PIECE:
        sums += _piece(places, inner, weight, row, end, start, width, limit, alpha, LAYOUT, FORMULA, CLAMP, OFFSET)
    else:
        tl.static_assert(WIDTH == 2 * _PIECE)
        one, other = apart(inner, "concatenated", HEIGHT, WIDTH)
        sums += _piece(places, one, weight, row, end, start, width, limit, alpha, LAYOUT, FORMULA, CLAMP, OFFSET)
        start += _PIECE
        sums += _piece(places, other, weight, row, end, start, width, limit, alpha, LAYOUT, FORMULA, CLAMP, OFFSET)
    tl.store(parts + slot.to(tl.int64) * across + part, sums, mask=row < end)


_PIECE = tl.constexpr(64)


@triton.jit
def _piece(
    places,
    inner,
    weight,
    row,
    end,
    start,
    width,
    limit,
    alpha,
    LAYOUT: tl.constexpr,
    FORMULA: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Write some columns to *places*, from the gradient *inner*; return the row sums for the weights' gradient."""
    of_before, weighted, before = places
    element = before.dtype.element_ty
    HEIGHT: tl.constexpr = inner.shape[0]
    WIDTH: tl.constexpr = inner.shape[1]
    column = start + tl.arange(0, WIDTH)
    mask = (row < end)[:, None] & (column < width)[None, :]
    wide = row.to(tl.int64)[:, None]
    if LAYOUT == "ungated":
        at = wide * width + column[None, :]
        value, slope = gate_factor(
            tl.load(before + at, mask=mask, other=0.0).to(tl.float32), limit, alpha, FORMULA, CLAMP
        )
        tl.store(of_before + at, (weight * inner * slope).to(element), mask=mask)
    else:
        at = wide * (2 * width) + column[None, :]
        turn = 2 * start + tl.arange(0, 2 * WIDTH)
        turns = wide * (2 * width) + turn[None, :]
        here = (row < end)[:, None] & (turn < 2 * width)[None, :]
        if LAYOUT == "concatenated":
            gate = tl.load(before + at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(before + at + width, mask=mask, other=0.0).to(tl.float32)
        else:
            gate, up = apart(tl.load(before + turns, mask=here, other=0.0).to(tl.float32), LAYOUT, HEIGHT, 2 * WIDTH)
        activated, gate_slope = gate_factor(gate, limit, alpha, FORMULA, CLAMP)
        factor, up_slope = clamped_up(up, limit, CLAMP)
        factor += OFFSET
        value = activated * factor
        of_gate = (weight * inner * factor * gate_slope).to(element)
        of_up = (weight * inner * activated * up_slope).to(element)
        if LAYOUT == "concatenated":
            tl.store(of_before + at, of_gate, mask=mask)
            tl.store(of_before + at + width, of_up, mask=mask)
        else:
            tl.store(of_before + turns, tl.reshape(tl.join(of_gate, of_up), (HEIGHT, 2 * WIDTH)), mask=here)
    tl.store(weighted + wide * width + column[None, :], (weight * value).to(element), mask=mask)
    return tl.sum(tl.where(mask, inner * value, 0.0), 1)


@cached_launches
@triton.jit(do_not_specialize=["slots"])
def _weights_backward(
    of_weights,
    parts,
    grad,
    index,
    bias,
    slots,
    experts,
    depth,
    across,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index + slot, mask=slot < slots, other=experts)
    here = (expert >= 0) & (expert < experts)
    part = tl.arange(0, PARTS)[None, :]
    at = slot.to(tl.int64)[:, None] * across + part
    total = tl.sum(tl.load(parts + at, mask=here[:, None] & (part < across), other=0.0), 1)
    if bias is not None:
        for first in range(0, depth, DEPTH):
            column = first + tl.arange(0, DEPTH)[None, :]
            mask = here[:, None] & (column < depth)
            upstream = tl.load(grad + (slot // K).to(tl.int64)[:, None] * depth + column, mask=mask, other=0.0)
            added = tl.load(bias + expert.to(tl.int64)[:, None] * depth + column, mask=mask, other=0.0)
            total += tl.sum(upstream.to(tl.float32) * added.to(tl.float32), 1)
    tl.store(of_weights + slot, total.to(of_weights.dtype.element_ty), mask=slot < slots)
