"""The layouts in which npu_rotary_mul takes a tensor and its tables, and how tensors of any shape are seen in one.

The operation takes three dimensions before the last (batch, heads and sequence, in three orders), and tables that lack
some of these: op-plugin, ``docs/zh/custom_APIs/torch_npu/torch_npu-npu_rotary_mul.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fuseplug_backends.dtypes import have_model_dtypes

Mode = Literal["half", "interleave"]

# The following is what that page says about Atlas A2 and A3.
_WIDTHS = range(2, 896, 2)
_EXTENTS = 1000  # batch and heads, each, are smaller; if interleaved, their product is
# Tables lack the dimensions "1", and have the dimensions "v". Dimensions missing in front have size 1.
_EITHER_MODE = ("", "v", "1", "v1", "1v", "11", "1v1", "11v", "v11")
_HALF_MODE = ("v1v", "vv1")


class OperandLayout(NamedTuple):
    """How a tensor and its tables are seen, each as three dimensions and the last one.

    Attributes:
        order: All dimensions of the tensor, in the order in which the layout has them.
        sizes: The sizes of the layout's three dimensions.
        rows: The same for the tables.
        single: Dimensions of the tables in which one row stands for all.
        repeated: The sizes to which the tables' leading dimensions are expanded; ``None`` if the tables lack no rows.
        outside: The sizes of the tensor's leading dimensions, in *order*.
        inverse: The inverse of *order*.
    """

    order: list[int]
    sizes: list[int]
    rows: list[int]
    single: list[int]
    repeated: list[int] | None
    outside: list[int]
    inverse: list[int]

    def of_tensor(self, x: Tensor) -> Tensor:
        """See the tensor as four dimensions."""
        return x.permute(self.order).reshape(*self.sizes, x.shape[-1])

    def of_table(self, table: Tensor) -> Tensor:
        """See one of its tables as four dimensions."""
        for dim in self.single:
            table = table.narrow(dim, 0, 1)
        if self.repeated is not None:
            table = table.expand(*self.repeated, -1).permute(self.order)
        return table.reshape(*self.rows, table.shape[-1])

    def undo(self, y: Tensor) -> Tensor:
        """Give a result of `of_tensor` its shape again."""
        return y.reshape(*self.outside, y.shape[-1]).permute(self.inverse)


def find_layout(x: Tensor, cos: Tensor, sin: Tensor, width: int, mode: Mode) -> OperandLayout | None:
    """Find a layout in which npu_rotary_mul takes *x*, in the order of its memory if possible.

    Attention has q as ``(batch, heads, sequence, width)`` in the memory of ``(batch, sequence, heads, width)``. In its
    own shape, q would be copied to be contiguous; in the order of memory, nothing is copied.

    Args:
        x: ``(..., head_dim)``.
        cos: ``(..., angles)``, broadcastable to *x* but for the last dimension.
        sin: Like *cos*.
        width: How many elements are rotated.
        mode: The mode of the operation.

    Returns:
        ``None`` if there is no layout: for dtypes, widths and sizes beyond the documented ones, for empty tensors,
        about which nothing is documented, and for tables that would enlarge the result.
    """
    if not (x.numel() and have_model_dtypes(x, cos, sin) and width in _WIDTHS):
        return None
    if cos.shape != sin.shape or cos.dim() > x.dim():
        return None
    # Finding a layout takes longer than generating one token.
    find = _find if torch.compiler.is_compiling() else _remembered
    return find(x.shape[:-1], x.stride(), cos.shape[:-1], _differ(cos, sin), mode)


def _differ(cos: Tensor, sin: Tensor) -> tuple[bool, ...]:
    """For each leading dimension of the tables, whether their rows may differ, rather than be one row repeated."""

    def differs(table: Tensor, dim: int) -> bool:
        # The gradient of a repeated row belongs to each of its places.
        return table.shape[dim] > 1 and (table.stride(dim) != 0 or table.requires_grad)

    return tuple([differs(cos, dim) or differs(sin, dim) for dim in range(cos.dim() - 1)])


def _find(
    sizes: Sequence[int], strides: Sequence[int], table: Sequence[int], differ: Sequence[bool], mode: Mode
) -> OperandLayout | None:
    missing = len(sizes) - len(table)
    if any(extent not in (1, size) for extent, size in zip(table, sizes[missing:], strict=True)):
        return None
    rows = [False] * missing + list(differ)
    memory = _order_of_memory(sizes, strides)
    runs: list[list[int]] = []
    for dim in memory:
        last = runs[-1][-1] if runs else dim
        if runs and rows[last] and rows[dim] and strides[last] == sizes[dim] * strides[dim]:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    if mode == "half" and [rows[run[0]] for run in runs] == [False, False, True]:
        batch, heads, tokens = runs
        # Batch, heads, sequence, and tables of the sequence alone: CANN refuses this layout where separate operations
        # were found to be faster, by sizes and the number of cores (rope_rotate_half_tiling.cpp, CheckBnsdBlockSkip).
        # With all heads in one batch, or with tables for each item of the batch, it is another layout, which CANN does
        # not check this way.
        runs = [[*batch, *heads], tokens]
        if not _is_documented(runs, rows, sizes, mode):
            runs, rows = [batch, heads, tokens], [extent or dim in batch for dim, extent in enumerate(rows)]
    if _is_documented(runs, rows, sizes, mode):
        return _layout(runs, rows, sizes, table)
    # Every token apart, and the innermost dimension that the tables lack as heads. If that is not the order of memory,
    # it costs a copy of x; and if the tables lack more dimensions, a copy of each table that repeats its rows.
    heads = [dim for dim in memory if not rows[dim]][-1:]
    tokens = [dim for dim in memory if dim not in heads]
    rows = [dim in tokens for dim in range(len(sizes))]
    runs = [run for run in (tokens, heads) if run]
    return _layout(runs, rows, sizes, table) if _is_documented(runs, rows, sizes, mode) else None


def _order_of_memory(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The leading dimensions of more than one element, the outermost in memory first."""
    order: list[int] = []
    for dim, size in enumerate(sizes):
        if size > 1:
            at = len(order)
            while at and strides[order[at - 1]] < strides[dim]:  # torch.compile cannot sort by sizes
                at -= 1
            order.insert(at, dim)
    return order


_remembered = functools.lru_cache(maxsize=1024)(_find)


def _is_documented(runs: Sequence[Sequence[int]], rows: Sequence[bool], sizes: Sequence[int], mode: Mode) -> bool:
    kinds = "".join(["v" if rows[run[0]] else "1" for run in runs])
    lacked = [_product(run, sizes) for run in runs if not rows[run[0]]]
    if kinds in _EITHER_MODE:
        extents = [_product(range(len(lacked)), lacked)] if mode == "interleave" else lacked
    elif kinds in _HALF_MODE and mode == "half":
        extents = [_product(runs[0], sizes), *lacked]
    else:
        return False
    return all(extent < _EXTENTS for extent in extents)


def _layout(
    runs: Sequence[Sequence[int]], rows: Sequence[bool], sizes: Sequence[int], table: Sequence[int]
) -> OperandLayout:
    missing = len(sizes) - len(table)
    laid = [dim for run in runs for dim in run]
    order = [*(dim for dim in range(len(sizes)) if dim not in laid), *laid, len(sizes)]
    in_order = [dim for dim in laid if rows[dim]]
    has_all = all(table[dim - missing] == sizes[dim] for dim in in_order)
    before = [1] * (3 - len(runs))
    return OperandLayout(
        order=order,
        sizes=[*before, *(_product(run, sizes) for run in runs)],
        rows=[*before, *(_product(run, sizes) if rows[run[0]] else 1 for run in runs)],
        single=[dim for dim, size in enumerate(table) if size > 1 and not rows[dim + missing]],
        repeated=None
        if has_all and in_order == sorted(in_order)
        else [size if row else 1 for size, row in zip(sizes, rows, strict=True)],
        outside=[sizes[dim] for dim in order[:-1]],
        inverse=sorted(range(len(order)), key=order.__getitem__),
    )


def _product(dims: Sequence[int], sizes: Sequence[int]) -> int:
    product = 1
    for dim in dims:  # math.prod is a C function, which torch.compile does not trace
        product *= sizes[dim]
    return product
