"""What is between the projections of a gated MLP as Inductor compiles it, on every device it knows, the CPU too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuseplug.activations import ACTIVATIONS
from fuseplug.functional import computed_by
from fuseplug.inductor import Compiled, plain, recording
from fuseplug.torch_private import get_tracing_state

from .. import reference
from ..reference import Gating

_LARGE = 1 << 18
_LARGE_FOR_TRAINING = 1 << 21
_LARGE_FOR_INFERENCE = 1 << 23
"""Elements of the gate from which a compiled call is worth it: for a formula of several operations; for an activation
and a product, with gradients and without.

torch's own activations are fast, so what is saved is a pass over memory, which a cache hides up to a few MB. On one x86
core, eager and compiled, in ms: silu in bfloat16, forward and backward, 1.60 and 1.90 at 2²⁰ elements, 3.04 and 2.95
at 2²¹, 30.4 and 14.5 at 12 · 2²⁰; in float32 3.79 and 3.27 at 2²¹, 9.78 and 6.70 at 2²². Forward alone, against a
product in place: 2.28 and 2.14 at 2²² in bfloat16, 7.18 and 6.17 at 12 · 2²⁰. Inductor's erf is slower than torch's:
gelu in bfloat16 breaks even at 2²². Of several operations: relu² forward 0.103 and 0.062 at 2¹⁸, silu between clamps
0.24 and 0.18.
"""


def compute(gating: Gating, gate: Tensor, up: Tensor | None) -> Tensor:
    """`fuseplug_swiglu.reference.swiglu`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding: intermediate roundings to a half type are left out, so it is as a rule
    nearer to the exact one. Nothing is kept for the backward but *gate* and *up*. Inside ``torch.compile``,
    ``torch.export`` and other tracers it *is* the reference, for the compiler around it to fuse further.
    """
    if torch.compiler.is_compiling() or get_tracing_state() is not None or not plain(gate, up):
        return reference.compute(gating, gate, up)
    if gating.how.sparse:
        gating, gate, up = reference.sparsified(gating, gate, up)
    records = recording(gate, up)
    if _is_large(gating, gate, up, records):
        return _fused(gating.constants, gate, up)
    if not records and gating.how.simple:
        gate, up = reference.separated(gating, gate, up)
        if gate.dtype is up.dtype:
            return ACTIVATIONS[gating.activation].function(gate, gating.beta).mul_(up)
    return reference.compute(gating, gate, up)


swiglu = computed_by(compute, reference.swiglu)


def swiglu_formula(gate: Tensor, up: Tensor | None, *constants: Any) -> Tensor:
    """The reference as a formula to compile: tensors first, then what is compiled in."""
    return reference.compute(Gating.of(constants), gate, up)


_fused = Compiled(swiglu_formula)


def _is_large(gating: Gating, gate: Tensor, up: Tensor | None, records: bool) -> bool:
    width = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    size = gate.numel() if up is not None else gate.numel() // 2
    if size < _LARGE or width in (1, size):
        # One row, and rows of one element, are sizes that Dynamo would compile once more for.
        return False
    activation = ACTIVATIONS[gating.activation]
    if activation.autocast and torch.is_autocast_enabled(gate.device.type):
        return False
    if gating.how.simple and activation.native:
        return size >= (_LARGE_FOR_TRAINING if records else _LARGE_FOR_INFERENCE)
    return True
