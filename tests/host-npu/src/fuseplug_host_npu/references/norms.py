"""RMSNorm and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import wide
from .registry import reference


def _normed(gamma: Tensor) -> tuple[int, ...]:
    """The dims that are normalised: as many as gamma has, from the end."""
    return tuple(range(-gamma.dim(), 0))


def _rstd(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return torch.rsqrt(wide(x).square().mean(_normed(gamma), keepdim=True) + epsilon)


@reference("npu_rms_norm")
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:  # noqa: A002
    """``x / rms(x) * gamma`` in x's dtype, and ``1 / rms(x)`` in float32 with size 1 along the normalised dims."""
    rstd = _rstd(input, gamma, epsilon)
    return (wide(input) * rstd * wide(gamma)).to(input.dtype), rstd


@reference("npu_gemma_rms_norm")
def gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:  # noqa: A002
    """``x / rms(x) * (1 + gamma)``, and ``1 / rms(x)``."""
    rstd = _rstd(input, gamma, epsilon)
    return (wide(input) * rstd * (1 + wide(gamma))).to(input.dtype), rstd


@reference("npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """The RMSNorm of the sum, ``1 / rms`` of it, and the sum."""
    total = (wide(x1) + wide(x2)).to(x1.dtype)
    return *rms_norm(total, gamma, epsilon), total


@reference("npu_rms_norm_backward")
def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Both: dx in x's dtype, and dgamma in float32: torch_npu's autograd casts that one to gamma's dtype.

    With n = x · rstd and g = dy · gamma: dx = rstd · (g - n · mean(g · n)), dgamma = Σ dy · n.
    """
    upstream, normed = wide(dy), wide(input) * rstd
    scaled = upstream * wide(gamma)
    dims = _normed(gamma)
    dx = rstd * (scaled - normed * (scaled * normed).mean(dims, keepdim=True))
    return dx.to(input.dtype), (upstream * normed).sum_to_size(gamma.shape)
