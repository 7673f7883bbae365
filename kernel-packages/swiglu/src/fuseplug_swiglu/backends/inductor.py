"""What is between the projections of a gated MLP as Inductor compiles it, on every device it knows, the CPU too."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseplug.inductor import Compiled, plain

from .. import reference
from ..reference import ACTIVATIONS, Semantics

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


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: str = "silu",
    variant: str = "plain",
    layout: str = "gate-first",
    limit: float | None = None,
    scale: float | None = None,
    sparsity: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """`fuseplug_swiglu.reference.swiglu`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding: intermediate roundings to a half type are left out, so it is as a rule
    nearer to the exact one. Nothing is kept for the backward but *gate* and *up*. Inside ``torch.compile``,
    ``torch.export`` and other tracers it *is* the reference, for the compiler around it to fuse further.
    """
    how = reference.check(gate, up, activation, variant, layout, limit=limit, scale=scale, sparsity=sparsity)
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or not plain(gate, up):
        first, second = (gate, up) if up is not None else reference.split(gate, layout)
        return reference.compute(how, activation, first, second, limit, scale, sparsity, beta)
    if how.sparse:
        # Outside of what is compiled, so that exactly those elements are kept which the original keeps.
        first, up = (gate, up) if up is not None else reference.split(gate, layout)
        gate = reference.sparsify(first, sparsity) if sparsity else first
        how, variant = reference.VARIANTS["plain"], "plain"
    records = torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad))
    if _is_large(gate, up, how, activation, records):
        return _fused((activation, variant, layout, limit, scale, beta), gate, up)
    first, second = (gate, up) if up is not None else reference.split(gate, layout)
    if not records and how.simple and first.dtype is second.dtype:
        return ACTIVATIONS[activation].function(first, beta).mul_(second)
    return reference.compute(how, activation, first, second, limit, scale, None, beta)


def swiglu_formula(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    variant: str,
    layout: str,
    limit: float | None,
    scale: float | None,
    beta: float,
) -> Tensor:
    """The reference as a formula to compile: tensors first, then what is compiled in."""
    if up is None:
        gate, up = reference.split(gate, layout)
    return reference.compute(reference.VARIANTS[variant], activation, gate, up, limit, scale, None, beta)


_fused = Compiled(swiglu_formula)


def _is_large(gate: Tensor, up: Tensor | None, how: Semantics, activation: str, records: bool) -> bool:
    width = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    size = gate.numel() if up is not None else gate.numel() // 2
    if size < _LARGE or width in (1, size):
        # One row, and rows of one element, are sizes that Dynamo would compile once more for.
        return False
    if ACTIVATIONS[activation].autocast and torch.is_autocast_enabled(gate.device.type):
        return False
    if how.simple and ACTIVATIONS[activation].native:
        return size >= (_LARGE_FOR_TRAINING if records else _LARGE_FOR_INFERENCE)
    return True
