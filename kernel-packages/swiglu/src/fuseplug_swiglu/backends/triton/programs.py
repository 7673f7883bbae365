"""The programs on the GPU: each gates one tile of one row, in float32, forward or backward.

For each element of the gate and of up, clamped or offset if the variant says so, ``a`` is the activated gate and ``f``
the factor that up gives:

    a = activation(scale · gate)
    y = a · f
    dgate = dy · f · a′,  dup = dy · a

Here a′ is the derivative of ``a`` with respect to the gate, recomputed. Rows of results are adjacent.
"""

# ruff: noqa: RET505 - Triton also compiles the code after a return, unless that code is in a branch

from __future__ import annotations

import triton
import triton.language as tl

from fuseplug_backends.triton import cached_launches
from fuseplug_backends.triton.activations import clamped_up, gate_factor


@cached_launches
@triton.jit
def forward(
    y,
    gate,
    up,
    width,
    gate_stride,
    up_stride,
    limit,
    scale,
    beta,
    FORMULA: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write y, reading gate and up once."""
    row, first = _place(width, BLOCK)
    g, u = _read(gate, up, row, first, width, gate_stride, up_stride, LAYOUT, BLOCK)
    activated, _ = gate_factor(g * scale, limit, beta, FORMULA, CLAMP)
    factor, _ = clamped_up(u, limit, CLAMP)
    if OFFSET:
        factor += 1.0
    at = first + tl.arange(0, BLOCK)
    tl.store(y + row * width + at, activated * factor, mask=at < width)


@cached_launches
@triton.jit
def backward(
    dgate,
    dup,
    dy,
    gate,
    up,
    width,
    gate_stride,
    up_stride,
    limit,
    scale,
    beta,
    FORMULA: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of gate and up that are wanted, reading gate, up and dy once."""
    row, first = _place(width, BLOCK)
    g, u = _read(gate, up, row, first, width, gate_stride, up_stride, LAYOUT, BLOCK)
    at = first + tl.arange(0, BLOCK)
    grad = tl.load(dy + row * width + at, mask=at < width).to(tl.float32)
    activated, slope = gate_factor(g * scale, limit, beta, FORMULA, CLAMP)
    slope *= scale
    factor, up_slope = clamped_up(u, limit, CLAMP)
    if OFFSET:
        factor += 1.0
    # As with torch's relu and clamp, a slope of zero lets nothing through, not even an infinite gradient.
    of_gate = tl.where(slope == 0.0, 0.0, grad * factor * slope)
    of_up = tl.where(up_slope == 0.0, 0.0, grad * activated)
    _write(dgate, dup, of_gate, of_up, row, first, width, LAYOUT, BLOCK)


@triton.jit
def _place(width, BLOCK: tl.constexpr):
    """The row of this program, and the first column of its tile."""
    tiles = tl.cdiv(width, BLOCK)
    # In 64 bits: the index of a row times the stride may exceed 2³¹ elements.
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK


@triton.jit
def _read(gate, up, row, first, width, gate_stride, up_stride, LAYOUT: tl.constexpr, BLOCK: tl.constexpr):
    """Gate and up of a tile, in float32."""
    gate += row * gate_stride
    if LAYOUT == "interleaved":
        # Load both at once from adjacent memory, and separate them in registers. With a stride of two, each load would
        # be of two bytes.
        at = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate + at, mask=at < 2 * width).to(tl.float32)
        return tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        if LAYOUT == "separate":
            up += row * up_stride
        elif LAYOUT == "gate-first":
            up = gate + width
        else:
            up = gate
            gate += width
        at = first + tl.arange(0, BLOCK)
        mask = at < width
        return tl.load(gate + at, mask=mask).to(tl.float32), tl.load(up + at, mask=mask).to(tl.float32)


@triton.jit
def _write(dgate, dup, of_gate, of_up, row, first, width, LAYOUT: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradients of a tile, into one tensor if gate and up are one; a gradient that is None is not wanted."""
    if LAYOUT == "interleaved":
        at = 2 * first + tl.arange(0, 2 * BLOCK)
        tl.store(dgate + 2 * row * width + at, tl.interleave(of_gate, of_up), mask=at < 2 * width)
    else:
        at = first + tl.arange(0, BLOCK)
        mask = at < width
        if LAYOUT == "separate":
            if dgate is not None:
                tl.store(dgate + row * width + at, of_gate, mask=mask)
            if dup is not None:
                tl.store(dup + row * width + at, of_up, mask=mask)
        else:
            dgate += 2 * row * width
            tl.store(dgate + at, of_gate if LAYOUT == "gate-first" else of_up, mask=mask)
            tl.store(dgate + width + at, of_up if LAYOUT == "gate-first" else of_gate, mask=mask)
