"""SwiGLU and GeGLU by Liger."""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.geglu import geglu_backward, geglu_forward
from liger_kernel.ops.swiglu import (
    swiglu_backward,
    swiglu_forward,
    swiglu_fused_gate_up_backward,
    swiglu_fused_gate_up_forward,
)
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import differentiated_again, recording, transparent, vjp
from fuseplug_swiglu import reference
from fuseplug_swiglu.reference import Gating

from .declines import other_activation, other_variant
from .launching import WIDEST, launch, serves, unseen_as_view


def compute(gating: Gating, gate: Tensor, up: Tensor | None) -> Tensor:
    """`fuseplug_swiglu.reference.swiglu` by Liger: the same arguments, result and errors.

    The result is the reference's up to rounding, and contiguous. Gate and up that one projection gives are read where
    they are if they are one after the other, and silu is the activation; otherwise Liger takes copies.

    For these calls it is the reference: activations and variants that `fuseplug_liger.declines` names; a gate and an up
    of two dtypes, or of others than float16, bfloat16 and float32; empty tensors; rows of more than 65536 elements;
    tracers, functorch transforms and subclasses; autocast, where that changes the activation. So is a backward that is
    to be differentiated again.
    """
    activation = ACTIVATIONS[gating.activation]
    autocast = activation.autocast and torch.is_autocast_enabled(gate.device.type)
    other = other_activation(gating.activation, gating.beta) or other_variant(gating.how.name, gating.activation)
    mixed = up is not None and up.dtype is not gate.dtype
    if autocast or other or mixed or not gate.dim() or gate.shape[-1] > WIDEST or not serves(gate, up):
        return by_reference(reference.compute, gating, gate, up)
    silu, scale = activation.formula == "swish", 1.0 if gating.scale is None else float(gating.scale)
    if up is None and not (silu and scale == 1.0 and gating.layout == "gate-first"):
        gate, up = reference.split(gate, gating.layout)
    if recording(gate, up):
        y: Tensor = _Gated.apply(gate, up, gating, silu, scale)  # type: ignore[no-untyped-call]
        return y
    return _forward(gate, up, silu, scale)


swiglu = computed_by(compute, reference.swiglu)


def _forward(gate: Tensor, up: Tensor | None, silu: bool, scale: float) -> Tensor:
    if up is None:
        y: Tensor = launch(swiglu_fused_gate_up_forward, gate, gate.contiguous())[1]
    elif silu:
        y = launch(swiglu_forward, gate, gate.contiguous(), up.contiguous(), scale)[2]
    else:
        y = launch(geglu_forward, gate, gate.contiguous(), up.contiguous())[2]
    return y


class _Gated(torch.autograd.Function):
    """Liger's own functions write the gradients over gate and up, and have no second derivative."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, gating: Gating, silu: bool, scale: float) -> Tensor:
        ctx.gating, ctx.silu, ctx.scale = gating, silu, scale
        ctx.save_for_backward(gate, up)
        return unseen_as_view(_forward(gate, up, silu, scale))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if differentiated_again() or not transparent(dy, gate):
            gating = ctx.gating
            found = vjp(lambda gate, up: reference.compute(gating, gate, up), (gate, up), wanted, (dy,))
        elif up is None:
            found = [
                launch(swiglu_fused_gate_up_backward, gate, gate.contiguous(), dy.contiguous()).view_as(gate),
                None,
            ]
        else:
            # Copies, because Liger puts the gradients in their place.
            values = [each.clone(memory_format=torch.contiguous_format) for each in (gate, up)]
            if ctx.silu:
                found = launch(swiglu_backward, gate, *values, dy.contiguous(), ctx.scale)
            else:
                found = launch(geglu_backward, gate, *values, dy.contiguous())
        return *[each if need else None for each, need in zip(found, wanted, strict=True)], None, None, None
