"""Rows times the matrix of their expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fuseplug_backends.triton import cached_launches, operation

from . import tiles
from .operands import matrices, matrix, product


def _results(rows: Tensor, _route: Tensor, weights: Sequence[Tensor], *arguments: Any) -> Tensor:
    *_, transposed, k, _by_slot, _fill = arguments
    return rows.new_empty(rows.shape[0] * (k or 1), weights[0].shape[-1 if transposed else -2])


@operation(
    "fuseplug_moe::project(Tensor rows, Tensor route, Tensor[] weights, Tensor[] more, Tensor? bias, SymInt experts,"
    " bool transposed, SymInt k, bool by_slot, bool fill) -> Tensor",
    _results,
)
def project(
    out: Tensor,
    rows: Tensor,
    route: Tensor,
    weights: Sequence[Tensor],
    more: Sequence[Tensor],
    bias: Tensor | None,
    experts: int,
    transposed: bool,
    k: int,
    by_slot: bool,
    fill: bool,
) -> None:
    """Multiply each row by the matrix of its expert, and add the expert's bias.

    Args:
        out: The result, ``(slots, out)``, in the order of the experts or, if *by_slot*, of the slots.
        rows: ``(slots, in)`` in the order of the experts, contiguous. If *k* is not 0, ``(tokens, in)``: each slot
            reads the row of its token.
        route: The route that `sort` made.
        weights: ``(experts, out, in)``, or that many matrices.
        more: ``(experts, out, in)``, or that many matrices, for the second half of rows twice as long; or none.
        bias: ``(experts, out)``.
        experts: The number of experts.
        transposed: Whether the last two dimensions of *weights* are swapped.
        k: How many slots a token has, if rows are tokens; otherwise 0.
        by_slot: See *out*.
        fill: Whether rows of experts elsewhere become zero; otherwise they stay uninitialised.
    """
    slots, width = out.shape
    if not slots:
        return
    depth = rows.shape[1] // (2 if more else 1)
    itemsize = rows.element_size()
    shape = tiles.product(tiles.height(slots, experts), width, depth, itemsize, rows.device)
    right = matrices(weights, transposed=not transposed)
    other = matrices(more, transposed=not transposed) if more else right
    grid = tiles.tiles(slots, experts, shape.height) * -(-width // shape.width)
    _project[(grid,)](
        out,
        rows,
        route,
        right.data,
        other.data,
        bias,
        slots,
        experts,
        depth,
        width,
        right.expert,
        right.row,
        right.column,
        ALIGNMENT=min(right.alignment, other.alignment),
        MORE=bool(more),
        K=k,
        BY_SLOT=by_slot,
        FILL=fill,
        **shape.compiled_in(depth, width, itemsize),
    )


@cached_launches
@triton.jit(do_not_specialize=["slots"])
def _project(
    out,
    rows,
    route,
    weights,
    more,
    bias,
    slots,
    experts,
    depth,
    width,
    stride_expert,
    stride_row,
    stride_column,
    ALIGNMENT: tl.constexpr,
    MORE: tl.constexpr,
    K: tl.constexpr,
    BY_SLOT: tl.constexpr,
    FILL: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    across = tl.cdiv(width, WIDTH)
    tile, part = place(tl.program_id(0), tl.num_programs(0) // across, across, GROUP)
    expert, first, end = tile_rows(route, slots, experts, tile)
    if (first >= end) | ((expert == experts) & (not FILL)):
        return
    column = part * WIDTH + tl.arange(0, WIDTH)
    row = first + tl.arange(0, HEIGHT)
    slot = tl.load(route + row, mask=row < end, other=0)
    expert_or_last = tl.minimum(expert, experts - 1)
    source = slot // K if K else tl.where(row < end, row, first)
    left = rows + source.to(tl.int64)[:, None] * (2 * depth if MORE else depth)
    terms = tl.where(expert < experts, depth, 0)
    here = column[None, :] < width
    at = column[None, :] * stride_column
    right = matrix(weights, expert_or_last, stride_expert, rows, ALIGNMENT) + at
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    total = product(total, left, right, terms, depth, stride_row, here, DEPTH, EVEN)
    if MORE:
        right = matrix(more, expert_or_last, stride_expert, rows, ALIGNMENT) + at
        total = product(total, left + depth, right, terms, depth, stride_row, here, DEPTH, EVEN)
    if bias is not None:
        at = bias + expert.to(tl.int64) * width + column
        biased = tl.where(expert < experts, width, 0)
        total += tl.load(at, mask=column < biased, other=0.0).to(tl.float32)[None, :]
    to = (slot if BY_SLOT else row).to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < width)[None, :])


@triton.jit
def place(program, tiles, across, GROUP: tl.constexpr):
    """Which of the *tiles* of rows a program computes, and which of the *across* tiles of columns.

    *GROUP* tiles of rows are computed before the next columns.
    """
    first = program // (GROUP * across) * GROUP
    rows = tl.minimum(tiles - first, GROUP)
    within = program % (GROUP * across)
    return first + within % rows, within // rows


@triton.jit
def tile_rows(route, slots, experts, tile):
    """The expert of a tile, the first row of the tile, and where the rows of that expert end."""
    entry = route + slots + experts + 3 * tile
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
