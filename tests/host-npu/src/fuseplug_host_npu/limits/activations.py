"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from . import sources
from .common import has_dims, is_contiguous, is_float, is_not_empty
from .registry import limit, require

_MOST_GROUPS = 8192


def _even(name: str, tensor: Tensor, dim: int) -> None:
    require(-tensor.dim() <= dim < tensor.dim(), "dim", f"a dim of {name} {list(tensor.shape)}", dim)
    require(tensor.shape[dim] % 2 == 0, name, f"of an even size along dim {dim}", tensor)


@limit("npu_swiglu", page="（beta）torch_npu-npu_swiglu.md")
def swiglu(input: Tensor, dim: int) -> None:  # noqa: A002
    """The input is contiguous, and has two halves along *dim*."""
    has_dims("x", input, 1, 8)
    is_float("x", input)
    _even("x", input, dim)
    is_contiguous("x", input)
    is_not_empty("x", input)


def _gradient(grad: Tensor, x: Tensor, dim: int) -> None:
    halved = list(x.shape)
    halved[dim] //= 2
    require(list(grad.shape) == halved, "grad_output", f"{halved}, half of the input along dim {dim}", grad)
    require(grad.dtype == x.dtype, "grad_output", f"{x.dtype}, as the input is", grad)


@limit("npu_swiglu_backward", page="（beta）torch_npu-npu_swiglu.md")
def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int) -> None:  # noqa: A002
    """The input is as in the forward, and the gradient fits its output."""
    swiglu(input, dim)
    _gradient(grad_output, input, dim)


@limit("npu_geglu_grad", page="help(torch_npu.npu_geglu)")
def geglu_grad(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    gelu: Tensor,
    dim: int,
    approximate: int,
    activate_left: bool,
) -> None:
    """The input is as in the forward; the gradient and the activated half fit its output."""
    geglu(input, dim, approximate, activate_left)
    _gradient(grad_output, input, dim)
    require(gelu.shape == grad_output.shape, "gelu", f"of the shape of grad_output {list(grad_output.shape)}", gelu)


@limit("npu_geglu", page="help(torch_npu.npu_geglu)")
def geglu(input: Tensor, dim: int, approximate: int, activate_left: bool) -> None:  # noqa: A002
    """The input has two halves along *dim*, and *approximate* is 0 (erf) or 1 (tanh)."""
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
    """The input has more than one dim, and *group_index* is int64."""
    del alpha, bias, interleaved
    require(limit > 0, "limit", "above zero", limit, sources.CLIPPED)
    has_dims("x", x, 2, 8)
    is_float("x", x)
    _even("x", x, dim)
    is_contiguous("x", x)
    if group_index is not None:
        require(group_index.dtype == torch.int64, "group_index", "int64", group_index)
        require(group_index.dim() == 1, "group_index", "of one dim", group_index)
        few = 0 < group_index.numel() <= _MOST_GROUPS
        require(few, "group_index", f"of 1 to {_MOST_GROUPS} elements", group_index, sources.CLIPPED)
