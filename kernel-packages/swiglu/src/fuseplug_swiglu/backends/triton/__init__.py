"""What is between the projections of a gated MLP as Triton compiles it: one launch forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import FORMULAS, differentiated_again, offsets_fit, recording, transparent, vjp

from ... import reference
from ...reference import Gating
from .launches import gated, gated_backward


def compute(gating: Gating, gate: Tensor, up: Tensor | None) -> Tensor:
    """`fuseplug_swiglu.reference.swiglu`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding, computed in float32 and rounded once, and is contiguous. Nothing is
    kept for the backward but *gate* and *up*. Other dtypes, what tracers and functorch want to see, and what autocast
    would widen are the reference.
    """
    activation = ACTIVATIONS[gating.activation]
    autocast = activation.autocast and torch.is_autocast_enabled(gate.device.type)
    if autocast or activation.formula not in FORMULAS or not _serves(gate, up):
        return by_reference(reference.compute, gating, gate, up)
    if gating.how.sparse:
        # The quantile is one number, so the host's: on the device it would be waited for.
        gating, gate, up = reference.sparsified(gating, gate, up, device="cpu")
    if recording(gate, up):
        recorded: Tensor = _Gated.apply(gate, up, gating.constants)  # type: ignore[no-untyped-call]
        return recorded
    y: Tensor = gated(gate, up, *gating.constants)
    return y


swiglu = computed_by(compute, reference.swiglu)


def _serves(gate: Tensor, up: Tensor | None) -> bool:
    return have_model_dtypes(gate, up) and gate.dim() > 0 and offsets_fit(gate, 1) and transparent(gate, up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, arguments: tuple[Any, ...]) -> Tensor:
        ctx.arguments = arguments
        ctx.save_for_backward(gate, up)
        y: Tensor = gated(gate, up, *arguments)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        of_gate, of_up, _ = ctx.needs_input_grad
        if differentiated_again() or not transparent(dy, gate):
            needs = (of_gate, of_up, *[False] * len(ctx.arguments))
            return (*vjp(_formula, (gate, up, *ctx.arguments), needs, (dy,))[:2], None)
        found = gated_backward(dy, gate, up, of_gate, of_up, *ctx.arguments)
        return found[0] if of_gate else None, found[-1] if of_up else None, None


def _formula(gate: Tensor, up: Tensor | None, *constants: Any) -> Tensor:
    return reference.compute(Gating.of(constants), gate, up)
