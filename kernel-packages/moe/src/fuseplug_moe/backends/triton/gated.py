"""The first projection with its gate: it reads the rows of the tokens themselves, and writes no row twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fuseplug_backends.triton import cached_launches, operation
from fuseplug_backends.triton.activations import clamped_up, gate_factor

from ...reference import GATES
from . import tiles
from .operands import matrices, matrix, product
from .project import place, tile_rows

SCHEMA = "str layout, str activation, float limit, float alpha"


def _gated_results(
    x: Tensor, _route: Tensor, gate_up: Sequence[Tensor], up: Sequence[Tensor], _bias: Any, _: int, *arguments: Any
) -> tuple[Tensor, Tensor]:
    transposed, k, layout, *_others, keep = arguments
    slots, columns = x.shape[0] * k, gate_up[0].shape[-1 if transposed else -2]
    halves = 1 if layout == "ungated" or up else 2
    both = columns * 2 if up else columns
    return x.new_empty(slots, columns // halves), x.new_empty(slots if keep else 0, both)


@operation(
    "fuseplug_moe::project_gated(Tensor x, Tensor route, Tensor[] gate_up, Tensor[] up, Tensor? bias, SymInt experts,"
    f" bool transposed, SymInt k, {SCHEMA}, bool keep) -> (Tensor, Tensor)",
    _gated_results,
)
def project_gated(
    results: tuple[Tensor, Tensor],
    x: Tensor,
    route: Tensor,
    gate_up: Sequence[Tensor],
    up: Sequence[Tensor],
    bias: Tensor | None,
    experts: int,
    transposed: bool,
    k: int,
    layout: str,
    activation: str,
    limit: float,
    alpha: float,
    keep: bool,
) -> None:
    """Compute the input of the second projection from the tokens.

    Args:
        results: ``(slots, inner)`` in the order of the experts; and, if *keep*, gate and up before the activation,
            ``(slots, inner or 2 · inner)``, laid out as *layout* says. Rows of experts elsewhere stay uninitialised.
        x: ``(tokens, hidden)``, contiguous.
        route: The route that `sort` made.
        gate_up: ``(experts, columns, hidden)``, or that many matrices.
        up: The matrices of up, in the same form, if up is separate; otherwise none.
        bias: ``(experts, columns)``.
        experts: The number of experts.
        transposed: Whether the last two dimensions of the weights are swapped.
        k: How many slots a token has.
        layout: As for `fuseplug_moe.reference.moe`.
        activation: A key of `GATES`.
        limit: Where the gate clamps, if it does.
        alpha: The slope of the gate, if it has one.
        keep: Whether to return gate and up, too.
    """
    inner, before = results
    slots, width = inner.shape
    if not slots:
        return
    halves = 1 if layout == "ungated" else 2
    depth, itemsize = x.shape[1], x.element_size()
    shape = tiles.product(tiles.height(slots, experts), halves * width, depth, itemsize, x.device)
    left = matrices(gate_up, transposed=not transposed)
    right = matrices(up, transposed=not transposed) if up else left
    row = GATES[activation]
    grid = tiles.tiles(slots, experts, shape.height) * -(-halves * width // shape.width)
    _project_gated[(grid,)](
        inner,
        before,
        x,
        route,
        left.data,
        right.data,
        bias,
        slots,
        experts,
        depth,
        width,
        left.expert,
        left.row,
        left.column,
        limit,
        row.row.steepness(alpha),
        K=k,
        ALIGNMENT=min(left.alignment, right.alignment),
        APART=bool(up),
        KEEP=keep,
        LAYOUT=layout,
        FORMULA=row.row.formula,
        CLAMP=row.clamp,
        OFFSET=row.offset,
        **shape.compiled_in(depth, halves * width, itemsize),
    )


@cached_launches
@triton.jit(do_not_specialize=["slots"])
def _project_gated(
    inner,
    before,
    x,
    route,
    gate_up,
    up,
    bias,
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
    APART: tl.constexpr,
    KEEP: tl.constexpr,
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
    HALVES: tl.constexpr = 1 if LAYOUT == "ungated" else 2
    across = tl.cdiv(width * HALVES, WIDTH)
    tile, part = place(tl.program_id(0), tl.num_programs(0) // across, across, GROUP)
    expert, first, end = tile_rows(route, slots, experts, tile)
    if (first >= end) | (expert == experts):
        return
    column, here = columns(part, width, LAYOUT, WIDTH)
    row = first + tl.arange(0, HEIGHT)
    slot = tl.load(route + row, mask=row < end, other=0)
    right = matrix(gate_up, expert, stride_expert, x, ALIGNMENT)
    right += column[None, :] * stride_column
    if APART:
        other = matrix(up, expert, stride_expert, x, ALIGNMENT) + (column - width)[None, :] * stride_column
        right = tl.where(column[None, :] < width, right, other)
    total = product(
        tl.zeros((HEIGHT, WIDTH), tl.float32),
        x + (slot // K).to(tl.int64)[:, None] * depth,
        right,
        depth,
        depth,
        stride_row,
        here[None, :],
        DEPTH,
        EVEN,
    )
    if bias is not None:
        at = bias + expert.to(tl.int64) * width * HALVES + column
        total += tl.load(at, mask=here, other=0.0).to(tl.float32)[None, :]
    # Rounded as the original rounds it, and as the backward will read it.
    rounded = total.to(x.dtype.element_ty)
    if KEEP:
        to = row.to(tl.int64)[:, None] * (width * HALVES) + column[None, :]
        tl.store(before + to, rounded, mask=(row < end)[:, None] & here[None, :])
    total = rounded.to(tl.float32)
    if HALVES == 1:
        value, _ = gate_factor(total, limit, alpha, FORMULA, CLAMP)
    else:
        gate, other = apart(total, LAYOUT, HEIGHT, WIDTH)
        value, _ = gate_factor(gate, limit, alpha, FORMULA, CLAMP)
        factor, _ = clamped_up(other, limit, CLAMP)
        factor += OFFSET
        value *= factor
    ROOM: tl.constexpr = WIDTH // HALVES
    column = part * ROOM + tl.arange(0, ROOM)
    to = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(inner + to, value.to(inner.dtype.element_ty), mask=(row < end)[:, None] & (column < width)[None, :])


@triton.jit
def columns(part, width, LAYOUT: tl.constexpr, WIDTH: tl.constexpr):
    """The columns of gate and up in a tile of *WIDTH*, and which of them exist.

    A tile has as many columns of gate as of up, so that the two meet: side by side or in turns, as in the weights.
    """
    at = tl.arange(0, WIDTH)
    if LAYOUT == "concatenated":
        HALF: tl.constexpr = WIDTH // 2
        place = part * HALF + at % HALF
        return at // HALF * width + place, place < width
    SIZE: tl.constexpr = 2 if LAYOUT == "interleaved" else 1
    column = part * WIDTH + at
    return column, column < width * SIZE


@triton.jit
def apart(both, LAYOUT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Gate and up of a tile that has the columns of `columns`."""
    if LAYOUT == "interleaved":
        return tl.reshape(both, (HEIGHT, WIDTH // 2, 2)).split()
    return tl.permute(tl.reshape(both, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)).split()
