"""The gating between the projections of an MLP, by Triton: one launch forward, one backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import FORMULAS, differentiable, offsets_fit, transparent

from ... import reference
from ...reference import Gating
from .launches import gated, gated_backward


def compute(gating: Gating, gate: Tensor, up: Tensor | None) -> Tensor:
    """`fuseplug_swiglu.reference.swiglu`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding, computed in float32 and rounded once, and is contiguous. Only *gate*
    and *up* are kept for the backward. The reference computes other dtypes, calls that tracers and functorch need to
    see, and activations that autocast would widen.
    """
    written = ACTIVATIONS[gating.activation].formula in FORMULAS
    if gating.is_cast(gate) or not written or not _serves(gate, up):
        return by_reference(reference.compute, gating, gate, up)
    if gating.variant.sparse:
        # The host computes the quantile, which is one number: it would have to wait for the device.
        gating, gate, up = reference.sparsified(gating, gate, up, device="cpu")
    y: Tensor = _fused(gating, gate, up)
    return y


swiglu = computed_by(compute, reference.swiglu)


def _serves(gate: Tensor, up: Tensor | None) -> bool:
    return have_model_dtypes(gate, up) and gate.dim() > 0 and offsets_fit(gate, 1) and transparent(gate, up)


def _forward(gating: Gating, _: Sequence[bool], *tensors: Tensor | None) -> tuple[Tensor, tuple[()]]:
    return gated(*tensors, *gating.constants), ()


def _backward(gating: Gating, needs: Sequence[bool], *tensors: Tensor | None) -> Any:
    return gated_backward(*tensors, *needs, *gating.constants)


_fused = differentiable(_forward, _backward, reference.compute)
