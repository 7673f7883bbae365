"""RMSNorm by Liger, whose modes compute the variants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
from liger_kernel.ops.utils import calculate_settings
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import differentiable
from fuseplug_rmsnorm import reference
from fuseplug_rmsnorm.reference import Norming, Variant

from .launching import WIDEST, launch, serves, unseen_as_view


def compute(norming: Norming, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
    """`fuseplug_rmsnorm.reference.rms_norm` by Liger: the same arguments, result and errors.

    The result is the reference's up to rounding. Liger's mode ``"llama"`` rounds the unit row, like the variants that
    multiply by the weight after the cast. Its mode ``"gemma"``, in float32 throughout, computes all other variants.

    The reference computes calls with gates or groups; with dtypes other than float16, bfloat16 and float32; with empty
    tensors; with rows of more than 65536 elements; for tracers, functorch transforms and tensor subclasses; and under
    autocast that changes the variant. It also computes a backward that is to be differentiated again.
    """
    variant, _, group_size = norming
    other = gate is not None or group_size is not None or variant.weight == "input"
    if variant.is_cast(x) or other or x.shape[-1] > WIDEST or not serves(x, weight):
        return by_reference(reference.compute, norming, x, weight, gate)
    result = reference.result_dtype(x, weight, variant)
    # Liger's result has the dtype of x. If a float32 weight widens the result, x is widened first: that rounds nothing.
    x = x.to(torch.promote_types(x.dtype, result))
    y: Tensor = _fused(norming, x, weight)
    return y.to(result)


rms_norm = computed_by(compute, reference.rms_norm)


def _mode(variant: Variant) -> tuple[float, str]:
    """Liger's offset of the weight, and its casting mode."""
    return (0.0 if variant.offset is None else 1.0), (
        "llama" if variant.weight == "after-cast" and variant.upcast else "gemma"
    )


def _forward(norming: Norming, _: Sequence[bool], x: Tensor, weight: Tensor | None) -> tuple[Tensor, tuple[Tensor]]:
    scale = None if weight is None else weight.contiguous()
    y, _, rstd, *_ = launch(
        rms_norm_forward, x, x.contiguous(), scale, float(norming.eps), *_mode(norming.variant), None
    )
    return unseen_as_view(y), (rstd,)


def _backward(
    norming: Norming, needs: Sequence[bool], dy: Tensor, rstd: Tensor, x: Tensor, weight: Tensor | None
) -> list[Tensor]:
    # Liger's own autograd function would overwrite the incoming gradient.
    dx, dweight = launch(
        rms_norm_backward,
        x,
        dy.contiguous(),
        x.contiguous().view(-1, x.shape[-1]),
        None if weight is None else weight.contiguous(),
        rstd,
        *_mode(norming.variant),
        *calculate_settings(x.shape[-1]),
        in_place=False,
        row_mode=None,
        needs_dw=needs[1],
    )
    return ([dx] if needs[0] else []) + ([dweight] if needs[1] else [])


def _formula(norming: Norming, x: Tensor, weight: Tensor | None) -> Tensor:
    return reference.compute(norming, x, weight, None)


_fused = differentiable(_forward, _backward, _formula)
