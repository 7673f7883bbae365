"""Gated activations."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from .common import wide
from .registry import reference


@reference("npu_swiglu")
def swiglu(input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002
    """``silu(a) * b``, where a is the first half of the input along *dim* and b the second."""
    gate, up = wide(input).chunk(2, dim)
    return (functional.silu(gate) * up).to(input.dtype)


@reference("npu_swiglu_backward")
def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002
    """The gradient of the input; silu'(a) = s + a · s · (1 - s), with s = sigmoid(a)."""
    gate, up = wide(input).chunk(2, dim)
    upstream, s = wide(grad_output), torch.sigmoid(gate)
    return torch.cat((upstream * up * (s + gate * s * (1 - s)), upstream * gate * s), dim).to(input.dtype)


def _geglu_parts(input: Tensor, dim: int, activate_left: bool) -> tuple[Tensor, Tensor]:  # noqa: A002
    """The activated half, and the other half."""
    left, right = wide(input).chunk(2, dim)
    return (left, right) if activate_left else (right, left)


def _gelu(approximate: int) -> str:
    return "tanh" if approximate else "none"


@reference("npu_geglu")
def geglu(
    input: Tensor,  # noqa: A002
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> tuple[Tensor, Tensor]:
    """``a * gelu(b)`` and ``gelu(b)``, where b is the second half along *dim*, or the first if *activate_left*."""
    active, other = _geglu_parts(input, dim, activate_left)
    gelu = functional.gelu(active, approximate=_gelu(approximate))
    return (other * gelu).to(input.dtype), gelu.to(input.dtype)


@reference("npu_geglu_grad")
def geglu_grad(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    gelu: Tensor,
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> Tensor:
    """The gradient of the input. It uses gelu(b) as the forward kept it, rounded."""
    active, other = _geglu_parts(input, dim, activate_left)
    upstream = wide(grad_output)
    of_active = torch.ops.aten.gelu_backward(upstream * other, active, approximate=_gelu(approximate))
    halves = (of_active, upstream * wide(gelu))
    return torch.cat(halves if activate_left else halves[::-1], dim).to(input.dtype)


@reference("npu_clipped_swiglu")
def clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """``a * sigmoid(alpha * a) * (b + bias)`` with a clamped from above and b from both sides (gpt-oss).

    Dims before *dim* are rows, and dims from *dim* on are one dim. Its even and odd elements, or its halves, are a and
    b. Rows after the last group of *group_index* are zero.
    """
    at = dim % x.dim()
    rows = wide(x).reshape(math.prod(x.shape[:at]), -1)
    gate, up = (rows[:, ::2], rows[:, 1::2]) if interleaved else rows.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result = gate * torch.sigmoid(alpha * gate) * (up + bias)
    if group_index is not None:
        result[int(group_index.sum()) :] = 0
    return result.reshape(*x.shape[:at], x.shape[at] // 2, *x.shape[at + 1 :]).to(x.dtype)


@reference("npu_silu")
def silu(input: Tensor) -> Tensor:  # noqa: A002
    """``x * sigmoid(x)``."""
    return functional.silu(wide(input)).to(input.dtype)


@reference("npu_silu_")
def silu_(input: Tensor) -> Tensor:  # noqa: A002
    """As `silu`, in place."""
    return input.copy_(silu(input))


@reference("npu_silu_backward")
def silu_backward(grad_output: Tensor, x0: Tensor, x1: Tensor) -> Tensor:
    """The gradient of the input *x0*; the output *x1* is not needed."""
    del x1
    found: Tensor = torch.ops.aten.silu_backward(wide(grad_output), wide(x0))
    return found.to(x0.dtype)


@reference("npu_gelu")
def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:  # noqa: A002
    """As `torch.nn.functional.gelu`."""
    return functional.gelu(wide(input), approximate=approximate).to(input.dtype)


@reference("npu_gelu_backward")
def gelu_backward(grad_output: Tensor, input: Tensor, *, approximate: str = "none") -> Tensor:  # noqa: A002
    """As torch's ``gelu_backward``."""
    found: Tensor = torch.ops.aten.gelu_backward(wide(grad_output), wide(input), approximate=approximate)
    return found.to(input.dtype)
