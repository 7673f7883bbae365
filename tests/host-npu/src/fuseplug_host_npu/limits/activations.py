"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import has_dims, is_contiguous, is_float, is_not_empty
from .registry import limit, require


def _even(name: str, tensor: Tensor, dim: int) -> None:
    require(-tensor.dim() <= dim < tensor.dim(), "dim", f"a dim of {name} {list(tensor.shape)}", dim)
    require(tensor.shape[dim] % 2 == 0, name, f"of an even size along dim {dim}", tensor)


@limit("npu_swiglu", page="（beta）torch_npu-npu_swiglu.md")
def swiglu(input: Tensor, dim: int) -> None:  # noqa: A002
    """Two halves of a contiguous tensor."""
    has_dims("x", input, 1, 8)
    is_float("x", input)
    _even("x", input, dim)
    is_contiguous("x", input)
    is_not_empty("x", input)


@limit("npu_geglu", page="help(torch_npu.npu_geglu)")
def geglu(input: Tensor, dim: int, approximate: int, activate_left: bool) -> None:  # noqa: A002
    """Two halves; erf (0) or tanh (1)."""
    del activate_left
    has_dims("x", input, 1, 8)
    is_float("x", input)
    _even("x", input, dim)
    require(approximate in (0, 1), "approximate", "0 or 1", approximate)


@limit("npu_clipped_swiglu", page="torch_npu-npu_clipped_swiglu.md")
def clipped_swiglu(
    x: Tensor,
    group_index: Tensor | None,
    dim: int,
    alpha: float,
    limit: float,
    bias: float,
    interleaved: bool,
) -> None:
    """More than one dim; groups are counted in int64."""
    del alpha, limit, bias, interleaved
    has_dims("x", x, 2, 8)
    is_float("x", x)
    _even("x", x, dim)
    is_contiguous("x", x)
    if group_index is not None:
        require(group_index.dtype == torch.int64, "group_index", "int64", group_index)
        require(group_index.dim() == 1, "group_index", "of one dim", group_index)
