"""How a call is cut into programs: each takes some positions, for which it reads the tables once, and some heads.

q, k and the tables are seen with three dimensions before the last. The heads lie along one of these, along which the
tables have a single row; positions lie along the other two. Strides may be any, so nothing is copied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ... import reference
from .program import Block

# Calculated for an H100. On an H200, other numbers were slower, or faster by less than the noise.

_MOST_ELEMENTS = 4096
"""Elements of q in one program: 8 KiB of a half type, which take 128 threads of 72 registers. 7 such programs fit on a
processor, and have 56 KiB on their way. The processor's share of the bandwidth, 25 bytes per ns, with 700 ns to the
memory and back, needs 18 KiB.
"""

_ENOUGH_ELEMENTS = 2048
"""Elements of q: with fewer, a program takes more positions, so that each of 128 threads has something to read."""

_PER_THREAD = 16
"""Elements of q: a vector of 16 bytes of a half type from each half of a row."""

_MOST_WARPS = 4

_VECTOR = 16
"""Elements: addresses that are multiples of it allow the widest loads, in any dtype."""

Sizes = Sequence[int]
Memory = tuple[Sizes, Sizes]
"""Shape and strides of a tensor."""


class Cut(NamedTuple):
    """One launch of `program.rotate`.

    Attributes:
        grid: How many programs there are, along positions and along heads.
        numbers: The arguments that follow the pointers: the numbers of positions, of positions along the inner
            dimension, of heads of q and of heads of k; then the strides along the outer dimension, the inner one and
            that of the heads, for q, k and their results; and the first two of these strides for the tables.
        block: The constants for which the program is compiled.
        warps: How many warps run it.
    """

    grid: tuple[int, int]
    numbers: tuple[int, ...]
    block: Block
    warps: int


def shared_dims(q: Sizes, k: Sizes, cos: Sizes, sin: Sizes) -> list[int]:
    """Find the dimensions along which the heads may lie.

    Args:
        q: The shape of q.
        k: The shape of k, or that of q again.
        cos: The shape of cos.
        sin: The shape of sin.

    Returns:
        Of the three dimensions before the last, those along which the tables have one row; if q and k differ in one of
        them, only that one. Empty if one launch is not enough.
    """
    if not len(cos) <= len(q) == len(k) <= 4 or cos != sin or 0 in (*q, *k, *cos):
        return []
    leading, other, table = _leading(q, 1), _leading(k, 1), _leading(cos, 1)
    if any(extent not in (1, size) for x in (leading, other) for extent, size in zip(table, x, strict=True)):
        return []
    differing = [dim for dim in range(3) if leading[dim] != other[dim]]
    if len(differing) > 1:
        return []
    return differing or [dim for dim in range(3) if table[dim] == 1]


@functools.lru_cache(maxsize=1024)
def cut(
    variant: str, transposed: bool, q: Memory, k: Memory | None, q_out: Memory, k_out: Memory | None, table: Memory
) -> Cut:
    """Cut a call that has `shared_dims`, and whose rows of q and k are one piece of memory each.

    Args:
        variant: A key of `reference.VARIANTS`.
        transposed: Whether gradients are rotated, back to those of the inputs.
        q: The tensor to rotate.
        k: The other tensor to rotate, if any.
        q_out: The result for q.
        k_out: The result for k.
        table: Both tables.
    """
    (q_shape, q_stride), (k_shape, _), (table_shape, table_stride) = q, k or q, table
    dims = _dims(q_shape, q_stride, shared_dims(q_shape, k_shape, table_shape, table_shape))
    outer, inner, q_heads = (_leading(q_shape, 1)[dim] for dim in dims)
    k_heads = _leading(k_shape, 1)[dims[-1]] if k else 0
    strides = [stride for x in (q, k, q_out, k_out) for stride in _strides(x, dims)]
    table_strides = _strides(table, dims[:2])
    # The widths count, too: one token has no strides, but should share the program of more tokens.
    unit = math.gcd(_VECTOR, q_shape[-1], k_shape[-1], *strides)
    table_unit = math.gcd(_VECTOR, table_shape[-1], *table_strides)

    row = _power_of_2(max(q_shape[-1], k_shape[-1]))
    along_heads = -(-max(q_heads, k_heads) // max(1, _MOST_ELEMENTS // row))
    q_block, k_block = (_power_of_2(-(-heads // along_heads)) for heads in (q_heads, k_heads))
    elements = row * max(q_block, k_block)
    positions = max(1, _ENOUGH_ELEMENTS // elements)

    rotation = reference.VARIANTS[variant]
    return Cut(
        grid=(-(-outer * inner // positions), along_heads),
        numbers=(
            *(outer * inner, inner, q_heads, k_heads),
            *(stride // unit for stride in strides),
            *(stride // table_unit for stride in table_strides),
        ),
        block=Block(
            reads=rotation.writes if transposed else rotation.reads,
            writes=rotation.reads if transposed else rotation.writes,
            table=rotation.writes if rotation.table == "full" else "first",
            planes=table_shape[-1] if rotation.table == "half" else table_shape[-1] // 2,
            trailing=rotation.width == "trailing",
            negated=rotation.negated,
            transposed=transposed,
            q_width=q_shape[-1],
            k_width=k_shape[-1],
            unit=unit,
            table_unit=table_unit,
            angle_stride=table_stride[-1],
            positions=positions,
            q_heads=q_block,
            k_heads=k_block,
        ),
        warps=min(_MOST_WARPS, max(1, positions * elements // (32 * _PER_THREAD))),
    )


def _dims(shape: Sizes, stride: Sizes, shared: Sizes) -> list[int]:
    """The outer and inner dimension of positions, and that of the heads: the innermost in memory of *shared*."""
    sizes, strides = _leading(shape, 1), _leading(stride, 0)
    heads = min([dim for dim in shared if sizes[dim] > 1], key=strides.__getitem__, default=shared[0])
    return [*sorted({0, 1, 2} - {heads}, key=strides.__getitem__, reverse=True), heads]


def _strides(x: Memory | None, dims: Sizes) -> list[int]:
    """The strides along *dims*; 0 along dimensions of one element."""
    if x is None:
        return [0] * len(dims)
    sizes, strides = _leading(x[0], 1), _leading(x[1], 0)
    return [strides[dim] if sizes[dim] > 1 else 0 for dim in dims]


def _leading(sizes: Sizes, missing: int) -> Sizes:
    """All but the last of one to four numbers, as three: *missing* stands for absent ones."""
    return (*[missing] * (4 - len(sizes)), *sizes[:-1])


def _power_of_2(number: int) -> int:
    """The smallest power of two that is not below *number*; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0
