"""The layouts in which npu_rotary_mul takes a tensor and its tables, and how a tensor of any shape is seen in one.

It takes three dimensions before the last, batch, heads and sequence in three orders, and tables that lack some of them:
op-plugin, ``docs/zh/custom_APIs/torch_npu/torch_npu-npu_rotary_mul.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Mode = Literal["half", "interleave"]

# From here on what that page says of Atlas A2 and A3.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDTHS = range(2, 896, 2)
_EXTENTS = 1000  # of batch and of heads each, or, interleaved, of their product: less than that
# Tables lack the dimensions of "1" and have those of "v"; those missing before them have size 1.
_EITHER_MODE = ("", "v", "1", "v1", "1v", "11", "1v1", "11v", "v11")
_HALF_MODE = ("v1v", "vv1")


class Layout(NamedTuple):
    """How a tensor and its tables are seen.

    Attributes:
        runs: The leading dimensions of the tensor, merged where they are in one run.
        rows: Whether the tables have rows for it, for each run.
    """

    runs: tuple[tuple[int, ...], ...]
    rows: tuple[bool, ...]

    def is_documented(self, sizes: Sequence[int], mode: Mode) -> bool:
        """Whether npu_rotary_mul takes it for a tensor of *sizes*."""
        kinds = "".join("v" if row else "1" for row in self.rows)
        extents = self._extents(sizes)
        lacked = [extent for extent, row in zip(extents, self.rows, strict=True) if not row]
        if kinds in _EITHER_MODE:
            return _product(lacked) < _EXTENTS if mode == "interleave" else all(each < _EXTENTS for each in lacked)
        return mode == "half" and kinds in _HALF_MODE and max(extents[0], *lacked) < _EXTENTS

    def of_tensor(self, x: Tensor) -> Tensor:
        """See ``(..., width)`` as four dimensions."""
        order = _order(self.runs, x.dim())
        return x.permute(order).reshape(*_three(self._extents(x.shape)), x.shape[-1])

    def of_table(self, table: Tensor, sizes: Sequence[int]) -> Tensor:
        """See the table of a tensor of *sizes* as four dimensions; rows that it lacks and should have are repeated."""
        table = table.reshape((1,) * (len(sizes) + 1 - table.dim()) + table.shape)
        rows = {dim for run, row in zip(self.runs, self.rows, strict=True) if row for dim in run}
        whole = [size if dim in rows else 1 for dim, size in enumerate(sizes)]
        for dim, size in enumerate(whole):
            if table.shape[dim] > size:
                table = table.narrow(dim, 0, size)  # repeated in memory
        table = table.expand(*whole, -1)
        order = _order(self.runs, table.dim())
        return table.permute(order).reshape(*_three(self._extents(whole)), table.shape[-1])

    def undo(self, y: Tensor, sizes: Sequence[int]) -> Tensor:
        """Give what `of_tensor` made of a tensor of *sizes* its shape again."""
        order = _order(self.runs, len(sizes) + 1)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return y.reshape(*(sizes[dim] for dim in order[:-1]), y.shape[-1]).permute(inverse)

    def _extents(self, sizes: Sequence[int]) -> list[int]:
        return [_product([sizes[dim] for dim in run]) for run in self.runs]


def layout(x: Tensor, cos: Tensor, sin: Tensor, width: int, mode: Mode) -> Layout | None:
    """Find a layout in which npu_rotary_mul takes *x*, seen in the order of its memory if that is one.

    Attention has q as ``(batch, heads, sequence, width)`` in the memory of ``(batch, sequence, heads, width)``. Given
    as it is shaped, it would be copied to be contiguous; in the order of memory nothing is.

    Args:
        x: ``(..., head_dim)``.
        cos: ``(..., angles)``, broadcastable to *x* but for the last dimension.
        sin: Like *cos*.
        width: How many elements are rotated.
        mode: That of the operation.

    Returns:
        ``None`` if there is none: for dtypes, widths and sizes beyond the documented ones, for empty tensors, of which
        nothing is documented, and for tables that would enlarge the result.
    """
    sizes = x.shape[:-1]
    if not (x.numel() and x.dtype in _DTYPES and cos.dtype in _DTYPES and sin.dtype in _DTYPES and width in _WIDTHS):
        return None
    if cos.shape != sin.shape or cos.dim() > x.dim() or not _broadcasts(cos, sizes):
        return None
    rows = _rows(cos, sin, len(sizes))
    strides = x.stride()
    memory = [dim for dim in sorted(range(len(sizes)), key=lambda dim: -strides[dim]) if sizes[dim] > 1]
    runs: list[tuple[int, ...]] = []
    for dim in memory:
        last = runs[-1][-1] if runs else dim
        if runs and rows[last] and rows[dim] and strides[last] == sizes[dim] * strides[dim]:
            runs[-1] = (*runs[-1], dim)
        else:
            runs.append((dim,))
    found = Layout(tuple(runs), tuple(rows[run[0]] for run in runs))
    if found.is_documented(sizes, mode):
        return found
    # Every token apart, and the innermost dimension that the tables lack as heads. Where that is not the order of
    # memory it costs a copy of x, and where the tables lack more, one of them for each that is repeated.
    heads = [dim for dim in memory if not rows[dim]][-1:]
    tokens = tuple(dim for dim in memory if dim not in heads)
    apart = Layout((tokens, *((dim,) for dim in heads)), (True, *(False for _ in heads)))
    return apart if apart.is_documented(sizes, mode) else None


def _broadcasts(table: Tensor, sizes: Sequence[int]) -> bool:
    return all(own in (1, size) for own, size in zip(reversed(table.shape[:-1]), reversed(sizes), strict=False))


def _rows(cos: Tensor, sin: Tensor, rank: int) -> list[bool]:
    """Along which of *rank* leading dimensions the tables differ; not where one row is but repeated in memory."""

    def differs(table: Tensor, dim: int) -> bool:
        # The gradient of a repeated row belongs to each of its places.
        return table.shape[dim] > 1 and (table.stride(dim) != 0 or table.requires_grad)

    own = cos.dim() - 1
    return [False] * (rank - own) + [differs(cos, dim) or differs(sin, dim) for dim in range(own)]


def _order(runs: Sequence[Sequence[int]], rank: int) -> list[int]:
    """All dimensions: those of size 1 first, which are in no run, and the last one last."""
    laid = [dim for run in runs for dim in run]
    return [*(dim for dim in range(rank - 1) if dim not in laid), *laid, rank - 1]


def _product(numbers: Sequence[int]) -> int:
    product = 1
    for number in numbers:  # math.prod is a function of C, which torch.compile does not trace
        product *= number
    return product


def _three(extents: Sequence[int]) -> list[int]:
    return [1] * (3 - len(extents)) + list(extents)
