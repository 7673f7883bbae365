"""SwiGLU and GeGLU by Liger."""

from __future__ import annotations

from collections.abc import Sequence

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
from fuseplug_backends.triton import differentiable
from fuseplug_swiglu import reference
from fuseplug_swiglu.reference import Gating

from .declines import other_activation, other_variant
from .launching import WIDEST, launch, serves, unseen_as_view


def compute(gating: Gating, gate: Tensor, up: Tensor | None) -> Tensor:
    """`fuseplug_swiglu.reference.swiglu` by Liger: the same arguments, result and errors.

    The result is the reference's up to rounding, and contiguous. If one projection gives gate and up, Liger reads them
    where they are, provided that up follows the gate and the activation is silu. Otherwise Liger takes copies.

    The reference computes calls with activations and variants that `fuseplug_liger.declines` names; with a gate and an
    up of two dtypes, or of dtypes other than float16, bfloat16 and float32; with empty tensors; with rows of more than
    65536 elements; for tracers, functorch transforms and tensor subclasses; and under autocast that changes the
    activation. It also computes a backward that is to be differentiated again.
    """
    other = other_activation(gating.activation, gating.beta) or other_variant(gating.variant.name, gating.activation)
    mixed = up is not None and up.dtype is not gate.dtype
    if gating.is_cast(gate) or other or mixed or not gate.dim() or gate.shape[-1] > WIDEST or not serves(gate, up):
        return by_reference(reference.compute, gating, gate, up)
    silu, scale = _form(gating)
    if up is None and not (silu and scale == 1.0 and gating.layout == "gate-first"):
        gate, up = reference.split(gate, gating.layout)
    y: Tensor = _fused(gating, gate, up)
    return y


swiglu = computed_by(compute, reference.swiglu)


def _form(gating: Gating) -> tuple[bool, float]:
    """Whether Liger's SwiGLU computes *gating*, rather than its GeGLU; and the factor of the gate."""
    return ACTIVATIONS[gating.activation].formula == "swish", 1.0 if gating.scale is None else float(gating.scale)


def _forward(gating: Gating, _: Sequence[bool], gate: Tensor, up: Tensor | None) -> tuple[Tensor, tuple[()]]:
    silu, scale = _form(gating)
    if up is None:
        y = launch(swiglu_fused_gate_up_forward, gate, gate.contiguous())[1]
    elif silu:
        y = launch(swiglu_forward, gate, gate.contiguous(), up.contiguous(), scale)[2]
    else:
        y = launch(geglu_forward, gate, gate.contiguous(), up.contiguous())[2]
    return unseen_as_view(y), ()


def _backward(gating: Gating, needs: Sequence[bool], dy: Tensor, gate: Tensor, up: Tensor | None) -> list[Tensor]:
    silu, scale = _form(gating)
    dy = dy.contiguous()
    if up is None:
        return [launch(swiglu_fused_gate_up_backward, gate, gate.contiguous(), dy).view_as(gate)]
    # Copies, because Liger overwrites them with the gradients.
    values = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (gate, up)]
    gradients = launch(swiglu_backward, gate, *values, dy, scale) if silu else launch(geglu_backward, gate, *values, dy)
    return [gradient for gradient, need in zip(gradients, needs, strict=True) if need]


_fused = differentiable(_forward, _backward, reference.compute)
