"""RMSNorm and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine import machine
from . import sources
from .common import has_dims, is_contiguous, is_float, is_not_empty
from .registry import limit, require


def _trailing(gamma: Tensor, x: Tensor) -> None:
    trailing = x.shape[max(x.dim() - gamma.dim(), 0) :]
    require(gamma.shape == trailing, "gamma", f"of the trailing dims of x {list(x.shape)}", gamma)


@limit("npu_rms_norm", page="（beta）torch_npu-npu_rms_norm.md")
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> None:  # noqa: A002
    """The input may be strided or empty; gamma has x's dtype or float32."""
    del epsilon
    has_dims("x", input, 2, 8)
    is_float("x", input)
    _trailing(gamma, input)
    require(gamma.dtype in (input.dtype, torch.float32), "gamma", f"{input.dtype}, as x is, or float32", gamma)


@limit("npu_rms_norm_backward", page=sources.NORM_GRADIENT)
def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> None:  # noqa: A002
    """Tensors fit those of the forward; A2 and A3 refuse an empty gradient."""
    require(dy.shape == input.shape, "dy", f"of the shape of x {list(input.shape)}", dy)
    require(dy.dtype == input.dtype, "dy", f"{input.dtype}, as x is", dy)
    _trailing(gamma, input)
    require(rstd.dtype == torch.float32, "rstd", "float32", rstd)
    rows = input.shape[: input.dim() - gamma.dim()]
    require(rstd.numel() == rows.numel(), "rstd", f"of {rows.numel()} elements, one a row of x", rstd)
    if not machine().is_950:
        is_not_empty("dy", dy)


@limit("npu_gemma_rms_norm", page="help(torch_npu.npu_gemma_rms_norm)")
def gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> None:  # noqa: A002
    """All tensors have one dtype; the input is neither strided nor empty."""
    del epsilon
    has_dims("x", input, 1, 8)
    is_float("x", input)
    is_contiguous("x", input)
    is_not_empty("x", input)
    _trailing(gamma, input)
    require(gamma.dtype == input.dtype, "gamma", f"{input.dtype}, as x is", gamma)


@limit("npu_add_rms_norm", page="torch_npu-npu_add_rms_norm.md")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> None:
    """All tensors have one dtype, and are not empty."""
    del epsilon
    has_dims("x1", x1, 1, 8)
    is_float("x1", x1)
    is_not_empty("x1", x1)
    require(x2.shape == x1.shape, "x2", f"of the shape of x1 {list(x1.shape)}", x2)
    _trailing(gamma, x1)
    for name, tensor in (("x2", x2), ("gamma", gamma)):
        require(tensor.dtype == x1.dtype, name, f"{x1.dtype}, as x1 is", tensor)
