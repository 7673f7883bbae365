"""The gating between the projections of an MLP on Ascend NPUs: ``npu_swiglu`` and its kin of torch_npu.

Nothing here imports torch_npu: a tensor on an NPU means that torch_npu is loaded.

The operations take gate and up in one tensor. The table compares their cost with that of an activation and a product.
Passes are over a tensor of the gate's size:

==============================  ====================================  ==================================
one projection for both         1 launch, 3 passes (geglu: 4)         2 launches, 5 passes
with its backward               2 launches, 8 passes (geglu: 10)      6 launches, 18 passes
two projections                 2 launches, 7 passes (geglu: 8)       2 launches, 5 passes
with its backward               3 launches, 12 passes (geglu: 14)     5 launches, 14 passes
==============================  ====================================  ==================================

So with one projection, the operations always win. With two, gate and up must first be put together (4 passes). Training
then gains two launches, and with npu_swiglu a third of the memory that is kept for the backward (gate and up, not the
activated gate); but a matmul that needs a contiguous gradient copies its half of theirs. Inference moves two passes
more, in as many launches. The operations are used for inference, too: a model must not give other numbers under
``no_grad``, and the product is rounded once, not twice.

``npu_geglu`` also takes ``"gate-second"``; for the other operations, the halves are exchanged. ``torch.roll`` does so
in one launch (4 passes), while a concatenation of the halves, which are not contiguous, may copy each of them first.
One copy (4 passes) takes ``"interleaved"`` apart; ``npu_clipped_swiglu`` takes it as it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug.fallback import by_reference
from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.functional import computed_by
from fuseplug_backends.npu import cann_has, first_order, recomputed

from .. import reference
from ..reference import Gating

_GEGLU = {"gelu": 0, "gelu_tanh": 1}
"""The argument ``approximate`` of ``npu_geglu``, by the formula of an activation."""


def unsupported(activation: str, variant: str, *, steep: bool = False) -> str | None:
    """Why torch_npu has no operation for a variant; ``None`` if it has one.

    Args:
        activation: A key of `ACTIVATIONS`.
        variant: A key of `fuseplug_swiglu.reference.VARIANTS`.
        steep: Whether swish is given a beta.
    """
    operation = _operation(activation, variant, steep=steep)
    if operation is None:
        clamp = reference.VARIANTS[variant].clamp
        return f"torch_npu has no operation that gates with {activation}{f', clamped {clamp} it' if clamp else ''}"
    loaded = hasattr(torch.ops.npu, "npu_swiglu")
    lacking = loaded and operation == "npu_clipped_swiglu" and not cann_has("npu_clipped_swiglu", 1, 64)
    return f"this torch_npu, or its CANN, has no {operation}" if lacking else None


def _operation(activation: str, variant: str, *, steep: bool) -> str | None:
    row = ACTIVATIONS[activation]
    if (clamp := reference.VARIANTS[variant].clamp) is not None:
        return "npu_clipped_swiglu" if clamp == "before" and row.formula == "swish" else None
    if row.formula in _GEGLU:
        return "npu_geglu"
    plain = row.beta == 1.0 or (row.beta is None and not steep)
    return "npu_swiglu" if row.formula == "swish" and plain else None


def compute(gating: Gating, gate: Tensor, up: Tensor | None) -> Tensor:
    """`fuseplug_swiglu.reference.swiglu` on an NPU: the same arguments, result and errors.

    The result is the reference's up to rounding, computed in float32 and rounded once. Where no operation computes the
    gating, and beyond the limits of the operations, the reference computes.
    """
    variant, activation, layout = gating.variant, gating.activation, gating.layout
    operation = _operation(activation, variant.name, steep=gating.beta != 1.0)
    if gating.is_cast(gate) or operation is None or not _serves(gate, up, gating.limit):
        return by_reference(reference.compute, gating, gate, up)
    if operation == "npu_clipped_swiglu" and not cann_has("npu_clipped_swiglu", 1, 64):
        return by_reference(reference.compute, gating, gate, up)
    dtype = gate.dtype if up is None or variant.wide else torch.promote_types(gate.dtype, up.dtype)
    if gating.scale is not None or gating.sparsity:
        gate, up = reference.separated(gating, gate, up)
    if gating.scale is not None:
        gate = gate * gating.scale
    if gating.sparsity:
        # The host computes this one number: the device would take a copy, which the host waits for, and five launches.
        gate = reference.sparsify(gate, gating.sparsity, device="cpu")
    if up is not None:
        gate, layout = torch.cat((gate, up), dim=-1), "gate-first"
    if operation == "npu_clipped_swiglu":
        steepness = ACTIVATIONS[activation].steepness(gating.beta)
        y = _clipped_swiglu(gate, layout, steepness, gating.limit, variant.offset)
    elif operation == "npu_geglu":
        y = _geglu(gate, layout, _GEGLU[ACTIVATIONS[activation].formula])
    else:
        y = first_order(torch.ops.npu.npu_swiglu(_gate_first(gate, layout).contiguous(), -1), "npu_swiglu")
    return y.to(dtype)


swiglu = computed_by(compute, reference.swiglu)


def npu_swiglu_forward(self: Any, hidden_state: Tensor) -> Tensor:
    """LLaMA-Factory's forward of a gated MLP with ``gate_proj``, ``up_proj`` and ``down_proj``, gated by SiLU.

    Args:
        self: The MLP; its own activation is ignored.
        hidden_state: ``(..., hidden)``.

    Returns:
        ``(..., hidden)``, in the dtype of *hidden_state*.
    """
    gated: Tensor = self.down_proj(swiglu(self.gate_proj(hidden_state), self.up_proj(hidden_state)))
    return gated


def _serves(gate: Tensor, up: Tensor | None, limit: float | None) -> bool:
    """Whether the operations take these, by their pages: op-plugin, docs/zh/custom_APIs/torch_npu.

    All three take float16, bfloat16 and float32. npu_swiglu: 1 to 8 dimensions, contiguous, not empty. npu_geglu: 1 to
    8 dimensions. npu_clipped_swiglu: more than one dimension, contiguous, and a finite limit above zero.
    """
    least = 1 if limit is None else 2
    shape = least <= gate.dim() <= 8 and gate.numel() > 0
    return have_model_dtypes(gate, up) and shape and (limit is None or 0 < limit < math.inf)


def _gate_first(gate_up: Tensor, layout: str) -> Tensor:
    if layout == "interleaved":
        return gate_up.reshape(*gate_up.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
    return gate_up if layout == "gate-first" else gate_up.roll(gate_up.shape[-1] // 2, dims=-1)


def _geglu(gate_up: Tensor, layout: str, approximate: int) -> Tensor:
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and gate_up.requires_grad:
        # torch_npu's meta function of npu_geglu_grad cannot be called, so no tracer gets through the backward.
        gate, up = reference.split(gate_up, layout)
        return functional.gelu(gate, approximate="tanh" if approximate else "none") * up
    if layout == "interleaved":
        gate_up, layout = _gate_first(gate_up, layout), "gate-first"
    return first_order(torch.ops.npu.npu_geglu(gate_up, -1, approximate, layout == "gate-first")[0], "npu_geglu")


def _clipped_swiglu(gate_up: Tensor, layout: str, steepness: float, limit: float | None, offset: bool) -> Tensor:
    interleaved = layout == "interleaved"
    gate_up = (gate_up if interleaved else _gate_first(gate_up, layout)).contiguous()
    return _clipped(gate_up, steepness, limit, 1.0 if offset else 0.0, interleaved)


def _clipped_op(gate_up: Tensor, steepness: float, limit: float, bias: float, interleaved: bool) -> Tensor:
    y: Tensor = torch.ops.npu.npu_clipped_swiglu(
        gate_up, dim=-1, alpha=steepness, limit=limit, bias=bias, interleaved=interleaved
    )
    return y


def _clipped_formula(gate_up: Tensor, steepness: float, limit: float, bias: float, interleaved: bool) -> Tensor:
    gate, up = reference.split(gate_up, "interleaved" if interleaved else "gate-first")
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(steepness * gate) * (up + bias)


_clipped = recomputed(_clipped_op, _clipped_formula)
