"""The gradients of the matrices and biases of all experts: sums over the rows of each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fuseplug_backends.triton import cached_launches, operation

from . import tiles
from .operands import dot


def _results(left: Tensor, right: Tensor, route: Tensor, slots: int, experts: int, left_k: int, right_k: int) -> Tensor:
    del route, slots, left_k, right_k
    return left.new_empty(experts, left.shape[1], right.shape[1])


@operation(
    "fuseplug_moe::weight_gradient(Tensor left, Tensor right, Tensor route, SymInt slots, SymInt experts,"
    " SymInt left_k, SymInt right_k) -> Tensor",
    _results,
)
def weight_gradient(
    out: Tensor, left: Tensor, right: Tensor, route: Tensor, slots: int, experts: int, left_k: int, right_k: int
) -> None:
    """For each expert the sum of the outer products of its rows; zero for one that has none.

    Args:
        out: ``(experts, m, n)``.
        left: ``(slots, m)`` in the order of the experts, contiguous; or ``(tokens, m)``, if *left_k* is not 0.
        right: ``(slots, n)``, or ``(tokens, n)``, likewise.
        route: Of `sort`.
        slots: How many there are.
        experts: How many there are.
        left_k: How many slots a token has, or 0.
        right_k: As *left_k*, of *right*.
    """
    height, width = left.shape[1], right.shape[1]
    if not out.numel():
        return
    shape = tiles.gradient(height, width, left.element_size(), left.device)
    down, across = -(-height // shape.height), -(-width // shape.width)
    _weight_gradient[(experts * down * across,)](
        out,
        left,
        right,
        route,
        slots,
        height,
        width,
        LEFT_K=left_k,
        RIGHT_K=right_k,
        HEIGHT=shape.height,
        WIDTH=shape.width,
        DEPTH=shape.depth,
        EVEN=height % shape.height == 0 and width % shape.width == 0,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


@cached_launches
@triton.jit(do_not_specialize=["slots"])
def _weight_gradient(
    out,
    left,
    right,
    route,
    slots,
    height,
    width,
    LEFT_K: tl.constexpr,
    RIGHT_K: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    down = tl.cdiv(height, HEIGHT)
    across = tl.cdiv(width, WIDTH)
    expert = tl.program_id(0) // (down * across)
    column = tl.program_id(0) // across % down * HEIGHT + tl.arange(0, HEIGHT)
    other = tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)
    first, end = rows_of(route, slots, expert)
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in range(first, end, DEPTH):
        row = start + tl.arange(0, DEPTH)
        here = (row < end)[:, None]
        a = tl.load(
            left + source(route, row, end, LEFT_K)[:, None] * height + column[None, :],
            mask=here if EVEN else here & (column < height)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + source(route, row, end, RIGHT_K)[:, None] * width + other[None, :],
            mask=here if EVEN else here & (other < width)[None, :],
            other=0.0,
        )
        total = dot(tl.trans(a), b, total)
    to = (expert.to(tl.int64) * height + column)[:, None] * width + other[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(column < height)[:, None] & (other < width)[None, :])


def _bias_results(rows: Tensor, weights: Tensor | None, route: Tensor, slots: int, experts: int, k: int) -> Tensor:
    del weights, route, slots, k
    return rows.new_empty(experts, rows.shape[1])


@operation(
    "fuseplug_moe::bias_gradient(Tensor rows, Tensor? weights, Tensor route, SymInt slots, SymInt experts, SymInt k)"
    " -> Tensor",
    _bias_results,
)
def bias_gradient(
    out: Tensor, rows: Tensor, weights: Tensor | None, route: Tensor, slots: int, experts: int, k: int
) -> None:
    """For each expert the sum of its rows, each times the weight of its slot; zero for one that has none.

    Args:
        out: ``(experts, n)``.
        rows: ``(slots, n)`` in the order of the experts, contiguous; or ``(tokens, n)``, if *k* is not 0.
        weights: ``(tokens, k)``, contiguous.
        route: Of `sort`.
        slots: How many there are.
        experts: How many there are.
        k: How many slots a token has, or 0.
    """
    width = rows.shape[1]
    if not out.numel():
        return
    block = min(128, max(16, tiles.power_of_two(width)))
    _bias_gradient[(experts, -(-width // block))](out, rows, weights, route, slots, width, K=k, BLOCK=block, DEPTH=32)


@cached_launches
@triton.jit(do_not_specialize=["slots"])
def _bias_gradient(out, rows, weights, route, slots, width, K: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, end = rows_of(route, slots, expert)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, end, DEPTH):
        row = start + tl.arange(0, DEPTH)
        at = source(route, row, end, K)[:, None] * width + column[None, :]
        read = tl.load(rows + at, mask=(row < end)[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
        if weights is not None:
            slot = tl.load(route + row, mask=row < end, other=0)
            read *= tl.load(weights + slot).to(tl.float32)[:, None]
        total += tl.sum(read, 0)
    tl.store(out + expert.to(tl.int64) * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def rows_of(route, slots, expert):
    """The first row of *expert*, and where its rows end."""
    ends = route + slots
    return tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)


@triton.jit
def source(route, row, end, K: tl.constexpr):
    """Which row is read for a sorted *row*: that of its token if a token has *K* slots, else itself."""
    slot = tl.load(route + row, mask=row < end, other=0) // K if K else tl.where(row < end, row, 0)
    return slot.to(tl.int64)
