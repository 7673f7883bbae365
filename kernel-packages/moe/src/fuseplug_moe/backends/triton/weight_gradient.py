"""The gradients of the matrices and biases of all experts: sums over the rows of each expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from fuseplug_backends.triton import cached_launches, operation

from . import tiles
from .operands import dot
from .project import place

_CAPABILITY_OF_GROUPED_MM = 9
"""The oldest generation of GPUs for which torch's grouped matmul is one launch; older ones wait for the host."""


def weight_gradient(
    left: Tensor, right: Tensor, route: Tensor, slots: int, experts: int, left_k: int, right_k: int
) -> Tensor:
    """For each expert, the sum of the outer products of its rows; zero for an expert without rows.

    Rows are gathered first: a product that gathers them takes up to 1.8 times as long, and torch's grouped matmul of
    gathered rows saves another tenth. On an H200 in bfloat16, with 4096 tokens and eight experts of 28,672 × 4096, a
    product that gathers, one of gathered rows and torch's take 5.50 ms, 3.42 and 3.07, including 0.04 for gathering.

    Args:
        left: ``(slots, m)`` in the order of the experts, contiguous; or ``(tokens, m)``, if *left_k* is not 0.
        right: ``(slots, n)``, or ``(tokens, n)``, likewise; in the same dtype.
        route: The route that `sort` made.
        slots: The number of slots.
        experts: The number of experts.
        left_k: How many slots a token has, or 0.
        right_k: As *left_k*, for *right*.

    Returns:
        ``(experts, m, n)``.
    """
    left = gather(left, route, slots, left_k) if left_k else left
    right = gather(right, route, slots, right_k) if right_k else right
    if not _grouped_mm_serves(left, right):
        result: Tensor = outer_products(left, right, route, experts)
        return result
    with torch.autocast(left.device.type, enabled=False):
        return functional.grouped_mm(left.t(), right, offs=route[slots : slots + experts])


def _grouped_mm_serves(left: Tensor, right: Tensor) -> bool:
    """Whether torch has a grouped matmul for this GPU, dtype and width: it reads 16 bytes at a time.

    Compiled graphs keep the Triton program, because that was tried there.
    """
    return (
        not torch.compiler.is_compiling()
        and left.is_cuda
        and torch.version.hip is None
        and left.dtype is torch.bfloat16
        and hasattr(functional, "grouped_mm")
        and left.shape[1] % 8 == right.shape[1] % 8 == 0
        and torch.cuda.get_device_properties(left.device).major >= _CAPABILITY_OF_GROUPED_MM
    )


def _gathered(rows: Tensor, _route: Tensor, slots: int, _k: int) -> Tensor:
    return rows.new_empty(slots, rows.shape[1])


@operation("fuseplug_moe::gather(Tensor rows, Tensor route, SymInt slots, SymInt k) -> Tensor", _gathered)
def gather(out: Tensor, rows: Tensor, route: Tensor, slots: int, k: int) -> None:
    """The rows of tokens, ``(tokens, n)``, contiguous, once for each of the *k* slots, in the order of the experts."""
    width = rows.shape[1]
    if not out.numel():
        return
    block = min(1024, tiles.power_of_two(width))
    _gather[(slots, -(-width // block))](out, rows, route, width, K=k, BLOCK=block)


@cached_launches
@triton.jit
def _gather(out, rows, route, width, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = (tl.load(route + row) // K).to(tl.int64)
    read = tl.load(rows + source * width + column, mask=column < width)
    tl.store(out + row.to(tl.int64) * width + column, read, mask=column < width)


def _results(left: Tensor, right: Tensor, route: Tensor, experts: int) -> Tensor:
    del route
    return left.new_empty(experts, left.shape[1], right.shape[1])


@operation(
    "fuseplug_moe::weight_gradient(Tensor left, Tensor right, Tensor route, SymInt experts) -> Tensor",
    _results,
)
def outer_products(out: Tensor, left: Tensor, right: Tensor, route: Tensor, experts: int) -> None:
    """`weight_gradient` for rows that are all in the order of the experts, as *out*: ``(experts, m, n)``."""
    (slots, height), width = left.shape, right.shape[1]
    if not out.numel():
        return
    shape = tiles.gradient(height, width, left.element_size(), left.device)
    down, across = -(-height // shape.height), -(-width // shape.width)
    _outer_products[(experts * down * across,)](
        out,
        left,
        right,
        route,
        slots,
        height,
        width,
        HEIGHT=shape.height,
        WIDTH=shape.width,
        DEPTH=shape.depth,
        GROUP=tiles.GROUP,
        EVEN=height % shape.height == 0 and width % shape.width == 0,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


@cached_launches
@triton.jit(do_not_specialize=["slots"])
def _outer_products(
    out,
    left,
    right,
    route,
    slots,
    height,
    width,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    down, across = tl.cdiv(height, HEIGHT), tl.cdiv(width, WIDTH)
    expert = tl.program_id(0) // (down * across)
    top, side = place(tl.program_id(0) % (down * across), down, across, GROUP)
    column = top * HEIGHT + tl.arange(0, HEIGHT)
    other = side * WIDTH + tl.arange(0, WIDTH)
    first, end = rows_of(route, slots, expert)
    row = tl.arange(0, DEPTH)[:, None]
    a_at = left + first.to(tl.int64) * height + row * height + column[None, :]
    b_at = right + first.to(tl.int64) * width + row * width + other[None, :]
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in range(first, end, DEPTH):
        here = start + row < end
        a = tl.load(a_at, mask=here if EVEN else here & (column < height)[None, :], other=0.0)
        b = tl.load(b_at, mask=here if EVEN else here & (other < width)[None, :], other=0.0)
        total = dot(tl.trans(a), b, total)
        a_at += DEPTH * height
        b_at += DEPTH * width
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
    """For each expert, the sum of its rows, each times the weight of its slot; zero for an expert without rows.

    Args:
        out: ``(experts, n)``.
        rows: ``(slots, n)`` in the order of the experts, contiguous; or ``(tokens, n)``, if *k* is not 0.
        weights: ``(tokens, k)``, contiguous.
        route: The route that `sort` made.
        slots: The number of slots.
        experts: The number of experts.
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
        slot = tl.load(route + row, mask=row < end, other=0)
        at = (slot // K if K else row).to(tl.int64)[:, None] * width + column[None, :]
        read = tl.load(rows + at, mask=(row < end)[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
        if weights is not None:
            read *= tl.load(weights + slot).to(tl.float32)[:, None]
        total += tl.sum(read, 0)
    tl.store(out + expert.to(tl.int64) * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def rows_of(route, slots, expert):
    """The first row of *expert*, and where its rows end."""
    ends = route + slots
    return tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
