"""Ops of torch that an NPU computes differently from the CPU, or has as one kernel where the CPU has none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..generators import drawing
from .common import wide
from .registry import reference


@reference("aten::matmul")
def matmul(self: Tensor, other: Tensor) -> Tensor:
    """``self @ other``, summed in float32 and rounded once; for integers as torch computes it.

    CPUs without AVX-512 take up to 100 times as long for torch's own matmul in half precision.
    """
    return (wide(self) @ wide(other)).to(self.dtype) if self.is_floating_point() else self @ other


@reference("aten::mm", "aten::bmm")
def mm(self: Tensor, mat2: Tensor) -> Tensor:
    """As `matmul`."""
    return matmul(self, mat2)


@reference("aten::mm.out", "aten::bmm.out")
def mm_out(self: Tensor, mat2: Tensor, *, out: Tensor) -> Tensor:
    """As `matmul`."""
    return out.resize_(*self.shape[:-1], mat2.shape[-1]).copy_(matmul(self, mat2))


@reference("aten::addmm")
def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * self + alpha * mat1 @ mat2``, as `matmul`."""
    terms = [wide(term) if term.is_floating_point() else term for term in (self, mat1, mat2)]
    return torch.addmm(*terms, beta=beta, alpha=alpha).to(self.dtype)


@reference("aten::matmul_backward")
def matmul_backward(
    grad: Tensor,
    self: Tensor,
    other: Tensor,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``self @ other``, with matmul's broadcasting; ``None`` for what *mask* does not ask for."""
    left = self.unsqueeze(0) if self.dim() == 1 else self
    right = other.unsqueeze(-1) if other.dim() == 1 else other
    upstream = grad.unsqueeze(-1) if other.dim() == 1 else grad
    upstream = upstream.unsqueeze(-2) if self.dim() == 1 else upstream
    of_self = matmul(upstream, right.mT).sum_to_size(left.shape).reshape(self.shape) if mask[0] else None
    of_other = matmul(left.mT, upstream).sum_to_size(right.shape).reshape(other.shape) if mask[1] else None
    return of_self, of_other


@reference("aten::histc")
def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002
    """As `torch.histc`, but for integers, too."""
    values = self if self.is_floating_point() else self.float()
    return torch.histc(values, bins, min, max).to(self.dtype)


@reference("npu_gather_backward")
def gather_backward(grad: Tensor, self_size: Sequence[int], dim: int, index: Tensor, sparse_grad: bool) -> Tensor:
    """The gradient, added to the elements that were gathered."""
    del sparse_grad
    return wide(grad).new_zeros(self_size).scatter_add_(dim, index, wide(grad)).to(grad.dtype)


@reference("repeat_interleave_backward_int")
def repeat_interleave_backward_int(grad: Tensor, input: Tensor, repeats: int, dim: int | None = None) -> Tensor:  # noqa: A002
    """The sum over the repetitions."""
    if dim is None:
        return wide(grad).reshape(*input.shape, repeats).sum(-1).to(grad.dtype)
    at = dim % input.dim()
    return wide(grad).reshape(*input.shape[: at + 1], repeats, *input.shape[at + 1 :]).sum(at + 1).to(grad.dtype)


@reference("repeat_interleave_backward_tensor")
def repeat_interleave_backward_tensor(grad: Tensor, input: Tensor, repeats: Tensor, dim: int | None = None) -> Tensor:  # noqa: A002
    """The sum over the repetitions; each element has its own number of them."""
    at = 0 if dim is None else dim % input.dim()
    shape = (input.numel(),) if dim is None else input.shape
    counts = repeats.expand(shape[at])
    source = torch.repeat_interleave(torch.arange(shape[at]), counts)
    return wide(grad).new_zeros(shape).index_add_(at, source, wide(grad)).reshape(input.shape).to(grad.dtype)


@reference("npu_linear")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """As `torch.nn.functional.linear`, in the arithmetic of `matmul`."""
    return torch.nn.functional.linear(wide(input), wide(weight), bias if bias is None else wide(bias)).to(input.dtype)


@reference("npu_linear_backward")
def linear_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Gradients of the input and of the weight."""
    rows = grad.flatten(0, -2)
    return matmul(grad, weight), matmul(rows.mT, input.flatten(0, -2))


@reference("_npu_dropout")
def dropout(input: Tensor, p: float) -> tuple[Tensor, Tensor]:  # noqa: A002
    """The input with elements zeroed with probability *p* and the others scaled; and the mask, a byte for each."""
    with drawing():
        kept = (torch.rand(input.shape, dtype=torch.float32) >= p).to(torch.uint8)
    return dropout_backward(input, kept, p), kept


@reference("npu_dropout_backward")
def dropout_backward(grad_output: Tensor, mask: Tensor, p: float) -> Tensor:
    """The gradient, zeroed and scaled alike. An NPU packs 8 elements of the mask into a byte; only it reads them."""
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return (wide(grad_output) * mask.reshape(grad_output.shape) * scale).to(grad_output.dtype)
