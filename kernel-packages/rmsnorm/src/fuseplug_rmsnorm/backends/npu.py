"""RMSNorm on Ascend NPUs, by torch_npu's ``npu_rms_norm``.

Nothing here imports torch_npu: a tensor on an NPU means that torch_npu is loaded.

The launches of a forward follow. ``npu_rms_norm`` reads x once and writes y once, while the models' own code takes six
launches or more. A tensor of the weight's size takes next to no time to compute, but a launch of its own:

=========================  ========================================================================================
``llama`` and its like     1: the norm
no weight                  2: ones, the norm
``gemma-own-offset``       2: 1 + w, the norm
``gemma``                  2, or 3 with a half weight: its cast, 1 + w, the norm
``gemma-input-scaled``     4: 1 + w, the product, ones, the norm
groups, with a weight      3: ones, the norm, the product with the weight, which differs from group to group
a gate                     3: the activation, the product, the norm
=========================  ========================================================================================

If x and the weight have different dtypes, casts are added; see `_widens`. The backward is one
``npu_rms_norm_backward``, and the gradients of the rest.

The ones are made anew each time. They are a single row, and a cache of them would need an entry for each device, dtype,
size, inference mode and tracer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuseplug.fallback import by_reference
from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.functional import computed_by
from fuseplug_backends.npu import first_order
from fuseplug_backends.tracing import is_transformed

from .. import reference
from ..reference import Norming, Variant


def compute(norming: Norming, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
    """`fuseplug_rmsnorm.reference.rms_norm` on an NPU: the same arguments, result and errors.

    The result is the reference's up to rounding. A row is computed in float32 and rounded once; a gate and its product
    may be rounded to the dtype of x. Beyond the limits of the operation, and where autocast changes the result
    of the variant, the reference computes.
    """
    if norming.group_size == x.shape[-1]:
        norming = norming._replace(group_size=None)
    variant, eps, group_size = norming
    if variant.is_cast(x) or not _serves(x, weight, in_groups=group_size is not None):
        return by_reference(reference.compute, norming, x, weight, gate)
    dtype = reference.result_dtype(x, weight, variant)
    if _widens(x, weight, dtype, variant, gated=gate is not None, in_groups=group_size is not None):
        x, gate = x.float(), None if gate is None else gate.float()
    gamma = None if weight is None else _gamma(weight, variant)
    if variant.gate == "before" and gate is not None:
        x = x * reference.activate(gate, variant)
    if variant.weight == "input" and gamma is not None:
        x, gamma = (x * gamma).to(x.dtype), None
    y = _norm(x, gamma, eps) if group_size is None else _norm_groups(x, gamma, eps, group_size)
    if variant.gate == "after" and gate is not None:
        y = y * reference.activate(gate, variant)
    return y.to(dtype)


rms_norm = computed_by(compute, reference.rms_norm)


def _serves(x: Tensor, weight: Tensor | None, *, in_groups: bool) -> bool:
    """Whether the operation takes these, by its page: op-plugin, docs/zh/custom_APIs/torch_npu, npu_rms_norm.

    It takes float16, bfloat16 and float32 in 2 to 8 dimensions, and groups add one; tensors need not be contiguous. The
    page allows empty tensors, too, but Atlas A2 and A3 refuse their gradients (ops-nn, rms_norm_grad_tiling.cpp).
    """
    return have_model_dtypes(x, weight) and 2 <= x.dim() <= (7 if in_groups else 8) and x.numel() > 0


def _widens(
    x: Tensor, weight: Tensor | None, dtype: torch.dtype, variant: Variant, *, gated: bool, in_groups: bool
) -> bool:
    """Whether to widen x to float32 first, because a rounding to the dtype of x on the way would show.

    It would show in a result of another *dtype*, and in the gradient of a wider weight if the norm does not itself
    multiply by the weight. A product with a gate may exceed the range of float16. In other cases x stays narrow, which
    moves half the bytes.
    """
    if x.dtype is torch.float32:
        return False
    if weight is not None and weight.dtype is not x.dtype:
        return gated or in_groups or dtype is not x.dtype
    return gated and variant.gate == "before" and x.dtype is torch.float16


def _gamma(weight: Tensor, variant: Variant) -> Tensor:
    """The factor of rows of mean square one."""
    if variant.offset is None:
        return weight
    return 1.0 + (weight.float() if variant.offset == "wide" else weight)


def _norm(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * gamma`` over the last dimension, in the dtype of *x*."""
    if gamma is None:
        gamma = x.new_ones(x.shape[-1])
    elif gamma.dtype is not x.dtype:
        gamma = gamma.float()  # documented for x of any dtype; two different half types are not
    return first_order(torch.ops.npu.npu_rms_norm(x, gamma, eps)[0], "npu_rms_norm")


def _norm_groups(x: Tensor, gamma: Tensor | None, eps: float, group_size: int) -> Tensor:
    """`_norm` of groups of neighbours; *gamma* is as long as a row."""
    y = _norm(reference.in_groups(x, group_size), None, eps).flatten(-2)
    return y if gamma is None else y * gamma


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    """`fuseplug_rmsnorm.reference.add_rms_norm` on an NPU, in one launch: the same arguments, results and errors.

    In half precision the operation rounds before it multiplies by the weight, and again after, as Llama's own code
    does; float16 is added and multiplied in half (CANN's add_rms_norm.h). So y may differ from `rms_norm` of the sum by
    a rounding.

    torch_npu's operation raises in a backward. This function has gradients, but they cannot be differentiated again.
    Beyond the limits of the operation, and for variants other than ``"llama"``, it adds and calls `rms_norm`.
    """
    reference.check_sum(x, residual, weight, variant)
    if weight is None or variant != "llama" or is_transformed() or not _serves_sums(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps, variant=variant, norm=rms_norm)
    y, total = _AddRMSNorm.apply(x, residual, weight, eps)  # type: ignore[no-untyped-call]
    return y, total


def _serves_sums(x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """Whether the operation takes these, by its page: op-plugin, docs/zh/custom_APIs/torch_npu, npu_add_rms_norm.

    It takes float16, bfloat16 or float32, all of one dtype, in 1 to 8 dimensions. Editions of the page differ on empty
    tensors.
    """
    dtypes = have_model_dtypes(x) and residual.dtype is x.dtype and weight.dtype is x.dtype
    return dtypes and x.dim() <= 8 and x.numel() > 0


class _AddRMSNorm(torch.autograd.Function):
    """``npu_add_rms_norm``. Its backward is that of ``npu_rms_norm`` at the sum, plus the sum's own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, rstd, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_total: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        total, weight, rstd = ctx.saved_tensors
        grad, grad_weight = torch.ops.npu.npu_rms_norm_backward(grad_y, total, weight, rstd)
        grad = grad + grad_total
        return grad, grad, grad_weight.to(weight.dtype), None
