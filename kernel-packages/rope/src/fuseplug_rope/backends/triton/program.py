"""What one program of the launch computes: the rotations of some heads of q and some of k, at some positions."""

# Triton's compiler reads the signatures here, and knows only one annotation.

from __future__ import annotations

from typing import Literal, NamedTuple

import triton
import triton.language as tl

from fuseplug_backends.triton import cached_launches

Order = Literal["halves", "pairs"]


class Block(NamedTuple):
    """What the program is compiled for, in one constant because each argument of a launch takes host time.

    Attributes:
        reads: Which elements of the input are the two coordinates of a plane, as in `reference.Variant`.
        writes: Which elements of the output are the two coordinates.
        table: Where the coordinates find their angles in a row of a table: each its own, in halves or in pairs; or both
            the same, among the ``"first"`` angles.
        planes: The number of planes.
        trailing: Whether the elements that are not rotated come before the rotated ones.
        negated: Whether the angles are negated.
        transposed: Whether to multiply with the transposed matrices, as in a backward.
        q_width: The last dimension of q.
        k_width: The last dimension of k.
        unit: The unit of the strides of q, k and the results, in elements: all are multiples of it.
        table_unit: The unit of the tables' strides, in elements.
        angle_stride: The stride of the tables' last dimension, in elements.
        positions: How many positions a program rotates, a power of two.
        q_heads: How many heads of q a program rotates, a power of two.
        k_heads: How many heads of k, a power of two, or 0.
    """

    reads: Order
    writes: Order
    table: Literal["halves", "pairs", "first"]
    planes: int
    trailing: bool
    negated: bool
    transposed: bool
    q_width: int
    k_width: int
    unit: int
    table_unit: int
    angle_stride: int
    positions: int
    q_heads: int
    k_heads: int


# These vary with the tokens, which must not cause a compilation. From the units of the strides, the compiler learns how
# addresses are aligned.
_VARYING = (
    *("positions", "inner_size", "q_heads", "k_heads"),
    *("q_outer", "q_inner", "q_head", "q_out_outer", "q_out_inner", "q_out_head"),
    *("k_outer", "k_inner", "k_head", "k_out_outer", "k_out_inner", "k_out_head"),
    *("table_outer", "table_inner"),
)


@cached_launches
@triton.jit(do_not_specialize=_VARYING)
def rotate(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    positions,
    inner_size,
    q_heads,
    k_heads,
    q_outer,
    q_inner,
    q_head,
    k_outer,
    k_inner,
    k_head,
    q_out_outer,
    q_out_inner,
    q_out_head,
    k_out_outer,
    k_out_inner,
    k_out_head,
    table_outer,
    table_inner,
    BLOCK: tl.constexpr,
):
    """Tiles are ``[positions, heads, elements]``; the numbers are those of `cutting.Cut`."""
    # Triton 3.6 takes the elements of a tuple for constants only if they have been given names.
    READS: tl.constexpr = BLOCK.reads
    WRITES: tl.constexpr = BLOCK.writes
    TABLE: tl.constexpr = BLOCK.table
    PLANES: tl.constexpr = BLOCK.planes
    TRAILING: tl.constexpr = BLOCK.trailing
    Q_WIDTH: tl.constexpr = BLOCK.q_width
    K_WIDTH: tl.constexpr = BLOCK.k_width
    UNIT: tl.constexpr = BLOCK.unit
    ANGLE_STRIDE: tl.constexpr = BLOCK.angle_stride

    position = tl.program_id(0) * BLOCK.positions + tl.arange(0, BLOCK.positions)[:, None, None]
    outer, inner = (position // inner_size).to(tl.int64), (position % inner_size).to(tl.int64)
    exists = position < positions

    row = (outer * table_outer + inner * table_inner) * BLOCK.table_unit
    cos_a, cos_b = _angles(cos + row, exists, TABLE, PLANES, ANGLE_STRIDE)
    sin_a, sin_b = _angles(sin + row, exists, TABLE, PLANES, ANGLE_STRIDE)
    if BLOCK.transposed:
        sin_a, sin_b = -sin_b, -sin_a
    if BLOCK.negated:
        sin_a, sin_b = -sin_a, -sin_b

    head = tl.program_id(1) * BLOCK.q_heads + tl.arange(0, BLOCK.q_heads)[None, :, None]
    q_exists = exists & (head < q_heads)
    q = _rows(q, outer, inner, head, q_outer, q_inner, q_head, UNIT)
    q_out = _rows(q_out, outer, inner, head, q_out_outer, q_out_inner, q_out_head, UNIT)
    Q_START: tl.constexpr = _start(Q_WIDTH, PLANES, TRAILING)
    q_a, q_b = _planes(q + Q_START, q_exists, READS, PLANES, 1)
    if BLOCK.k_heads > 0:
        head = tl.program_id(1) * BLOCK.k_heads + tl.arange(0, BLOCK.k_heads)[None, :, None]
        k_exists = exists & (head < k_heads)
        k = _rows(k, outer, inner, head, k_outer, k_inner, k_head, UNIT)
        k_out = _rows(k_out, outer, inner, head, k_out_outer, k_out_inner, k_out_head, UNIT)
        K_START: tl.constexpr = _start(K_WIDTH, PLANES, TRAILING)
        # k is read before q is written; otherwise, reading k would wait for q to arrive.
        k_a, k_b = _planes(k + K_START, k_exists, READS, PLANES, 1)
        k_a, k_b = k_a * cos_a - k_b * sin_a, k_b * cos_b + k_a * sin_b
        _store(k_out + K_START, k_exists, k_a, k_b, WRITES, PLANES)
        _copy_rest(k_out, k, k_exists, K_WIDTH, PLANES, TRAILING)
    q_a, q_b = q_a * cos_a - q_b * sin_a, q_b * cos_b + q_a * sin_b
    _store(q_out + Q_START, q_exists, q_a, q_b, WRITES, PLANES)
    _copy_rest(q_out, q, q_exists, Q_WIDTH, PLANES, TRAILING)


@triton.jit
def _rows(x, outer, inner, head, outer_stride, inner_stride, head_stride, UNIT: tl.constexpr):
    """Where the rows of a tile begin."""
    return x + (outer * outer_stride + inner * inner_stride + head.to(tl.int64) * head_stride) * UNIT


@triton.jit
def _angles(row, exists, TABLE: tl.constexpr, PLANES: tl.constexpr, STRIDE: tl.constexpr):
    """The values of a table for the first coordinate of each plane, and for the second."""
    if TABLE == "first":
        plane = tl.arange(0, triton.next_power_of_2(PLANES))[None, None, :]
        angle = tl.load(row + plane * STRIDE, exists & (plane < PLANES)).to(tl.float32)
        return angle, angle
    return _planes(row, exists, TABLE, PLANES, STRIDE)


@triton.constexpr_function
def _start(width, planes, trailing):
    """Where the rotated elements begin."""
    return width - 2 * planes if trailing else 0


@triton.jit
def _copy_rest(target, source, exists, WIDTH: tl.constexpr, PLANES: tl.constexpr, TRAILING: tl.constexpr):
    """Copy the elements that are not rotated."""
    REST: tl.constexpr = WIDTH - 2 * PLANES
    if REST > 0:
        element = tl.arange(0, triton.next_power_of_2(REST))[None, None, :]
        inside = exists & (element < REST)
        if not TRAILING:
            element += 2 * PLANES
        tl.store(target + element, tl.load(source + element, inside), inside)


@triton.jit
def _planes(rows, exists, ORDER: tl.constexpr, PLANES: tl.constexpr, STRIDE: tl.constexpr):
    """The two coordinates of every plane, in float32."""
    PADDED: tl.constexpr = triton.next_power_of_2(PLANES)
    if ORDER == "pairs":
        # Loaded together and parted in registers: it takes twice as many loads to leave out every other element.
        element = tl.arange(0, 2 * PADDED)[None, None, :]
        both = tl.load(rows + element * STRIDE, exists & (element < 2 * PLANES)).to(tl.float32)
        return tl.split(tl.reshape(both, [both.shape[0], both.shape[1], PADDED, 2]))
    plane = tl.arange(0, PADDED)[None, None, :]
    inside = exists & (plane < PLANES)
    first = tl.load(rows + plane * STRIDE, inside).to(tl.float32)
    second = tl.load(rows + (PLANES + plane) * STRIDE, inside).to(tl.float32)
    return first, second


@triton.jit
def _store(rows, exists, first, second, ORDER: tl.constexpr, PLANES: tl.constexpr):
    """Write the two coordinates of every plane, rounded here and nowhere else."""
    PADDED: tl.constexpr = first.shape[2]
    if ORDER == "pairs":
        element = tl.arange(0, 2 * PADDED)[None, None, :]
        both = tl.reshape(tl.join(first, second), [first.shape[0], first.shape[1], 2 * PADDED])
        tl.store(rows + element, both, exists & (element < 2 * PLANES))
    else:
        plane = tl.arange(0, PADDED)[None, None, :]
        inside = exists & (plane < PLANES)
        tl.store(rows + plane, first, inside)
        tl.store(rows + PLANES + plane, second, inside)
