"""RMSNorm and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import wide
from .registry import reference

_ORDER = torch.Generator()
"""Draws the order in which sums are added; a user's seed has no effect on it."""


def _normed(gamma: Tensor) -> tuple[int, ...]:
    """The normalised dims: the last ones, as many as gamma has."""
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
    """The RMSNorm of the sum, ``1 / rms`` of it, and the sum.

    Unlike `rms_norm`, it rounds twice: x · rstd to the dtype of x, then the product with gamma. In float16 it adds and
    multiplies in half precision, so it normalises the rounded sum; in bfloat16, the sum before rounding
    (hicann/ops-nn e5c3fa93, norm/add_rms_norm/op_kernel/add_rms_norm.h, Compute).
    """
    exact = wide(x1) + wide(x2)
    total = exact.to(x1.dtype)
    summed = wide(total) if x1.dtype == torch.float16 else exact
    rstd = _rstd(summed, gamma, epsilon)
    normed = (summed * rstd).to(x1.dtype)
    return (wide(normed) * wide(gamma)).to(x1.dtype), rstd, total


@reference("npu_rms_norm_backward")
def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Both gradients: dx in x's dtype, and dgamma in float32, which torch_npu's autograd casts to gamma's dtype.

    With n = x · rstd and g = dy · gamma: dx = rstd · (g - n · mean(g · n)), dgamma = Σ dy · n. The cores add the
    rows of dgamma by atomic operations, in a different order each time, unless torch is set to be deterministic.
    """
    upstream, normed = wide(dy), wide(input) * rstd
    scaled = upstream * wide(gamma)
    dims = _normed(gamma)
    dx = rstd * (scaled - normed * (scaled * normed).mean(dims, keepdim=True))
    rows = (upstream * normed).reshape(-1, *gamma.shape)
    if not torch.are_deterministic_algorithms_enabled():
        rows = rows[torch.randperm(len(rows), generator=_ORDER)]
    return dx.to(input.dtype), rows.sum(0)
