"""The launch of the kernel, as an operation of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fuseplug_backends.triton import operation

from ...reference import VARIANTS
from .cutting import cut
from .program import rotate as program

if TYPE_CHECKING:
    from .cutting import Memory


def _results(
    q: Tensor,
    k: Tensor | None,
    _cos: Tensor,
    _sin: Tensor,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    variant: str,
    transposed: bool,
) -> list[Tensor]:
    keep_order = transposed or VARIANTS[variant].keeps_order
    q_out = _alike(q, q_dtype, keep_order)
    return [q_out] if k is None else [q_out, _alike(k, k_dtype, keep_order)]


def _alike(x: Tensor, dtype: torch.dtype, keep_order: bool) -> Tensor:
    """A dense tensor whose rows are one piece of memory each; on request in the memory order of *x*, if possible."""
    y = torch.empty_like(x, dtype=dtype) if keep_order else None
    if y is not None and y.stride(-1) == 1:
        return y
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@operation(
    "fuseplug_rope::rotate(Tensor q, Tensor? k, Tensor cos, Tensor sin, ScalarType q_dtype, ScalarType k_dtype, "
    "str variant, bool transposed) -> Tensor[]",
    _results,
)
def rotate(
    results: list[Tensor],
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    _q_dtype: torch.dtype,
    _k_dtype: torch.dtype,
    variant: str,
    transposed: bool,
) -> None:
    """Rotate q and k, or the gradients of their rotations; the shapes must have `cutting.shared_dims`."""
    q_out, k_out = results if k is not None else (results[0], None)
    q, k = _readable(q), None if k is None else _readable(k)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    cuts = cut(variant, transposed, _memory(q), _memory(k), _memory(q_out), _memory(k_out), _memory(cos))
    program[cuts.grid](q, k, q_out, k_out, cos, sin, *cuts.numbers, cuts.block, num_warps=cuts.warps)


def _readable(x: Tensor) -> Tensor:
    """*x* with rows that are one piece of memory each."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _memory(x: Tensor | None) -> Memory | None:
    return None if x is None else (x.shape, x.stride())
