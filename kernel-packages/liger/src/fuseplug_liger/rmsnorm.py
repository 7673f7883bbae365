"""RMSNorm by Liger: which of its modes is which variant."""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import differentiated_again, recording, transparent, vjp
from fuseplug_rmsnorm import reference
from fuseplug_rmsnorm.reference import Norming, Variant

from .launching import WIDEST, launch, serves, unseen_as_view


def compute(norming: Norming, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
    """`fuseplug_rmsnorm.reference.rms_norm` by Liger: the same arguments, result and errors.

    The result is the reference's up to rounding. Liger's mode ``"llama"`` rounds the unit row as the variants do that
    multiply the weight after the cast. All other variants are its mode ``"gemma"``, in float32 throughout.

    For these calls it is the reference: gates and groups; other dtypes than float16, bfloat16 and float32; empty
    tensors; rows of more than 65536 elements; tracers, functorch transforms and subclasses; autocast, where that
    changes the variant. So is a backward that is to be differentiated again.
    """
    how, _, group_size = norming
    autocast = how.autocast and torch.is_autocast_enabled(x.device.type)
    other = gate is not None or group_size is not None or how.weight == "input"
    if autocast or other or x.shape[-1] > WIDEST or not serves(x, weight):
        return by_reference(reference.compute, norming, x, weight, gate)
    result = reference.result_dtype(x, weight, how)
    # Liger's result has the dtype of x. Where a float32 weight widens it, x comes wide; nothing is rounded by that.
    x = x.to(torch.promote_types(x.dtype, result))
    if recording(x, weight):
        y: Tensor = _RMSNorm.apply(x, weight, norming)  # type: ignore[no-untyped-call]
    else:
        y = _forward(x, weight, norming)[0]
    return y.to(result)


rms_norm = computed_by(compute, reference.rms_norm)


def _mode(how: Variant) -> tuple[float, str]:
    """Liger's offset of the weight, and its casting mode."""
    return (0.0 if how.offset is None else 1.0), ("llama" if how.weight == "after-cast" and how.upcast else "gemma")


def _forward(x: Tensor, weight: Tensor | None, norming: Norming) -> Any:
    scale = None if weight is None else weight.contiguous()
    return launch(rms_norm_forward, x, x.contiguous(), scale, float(norming.eps), *_mode(norming.how), None)


class _RMSNorm(torch.autograd.Function):
    """Liger's own function writes the gradient over the one that comes in, and has a wrong second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, norming: Norming) -> Tensor:
        y, _, rstd, *settings, _ = _forward(x, weight, norming)
        ctx.norming, ctx.settings = norming, settings
        ctx.save_for_backward(x, weight, rstd)
        return unseen_as_view(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if differentiated_again() or not transparent(dy, x):
            norming = ctx.norming
            return (
                *vjp(lambda x, weight: reference.compute(norming, x, weight, None), (x, weight), wanted, (dy,)),
                None,
            )
        dx, dweight = launch(
            rms_norm_backward,
            x,
            dy.contiguous(),
            x.contiguous().view(-1, x.shape[-1]),
            None if weight is None else weight.contiguous(),
            rstd,
            *_mode(ctx.norming.how),
            *ctx.settings,
            in_place=False,
            row_mode=None,
            needs_dw=wanted[1],
        )
        return dx if wanted[0] else None, dweight, None
