"""The gating between the projections of an MLP, compiled by Inductor, on every device it knows, including the CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import Compiled, worth_compiling

from .. import reference
from ..reference import Gating


def compute(gating: Gating, gate: Tensor, up: Tensor | None) -> Tensor:
    """`fuseplug_swiglu.reference.swiglu`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding. Intermediate roundings to a half type are left out, so the result is
    as a rule closer to the exact one. Only *gate* and *up* are kept for the backward. Inside ``torch.compile``,
    ``torch.export`` and other tracers, the reference computes, for the compiler around it to fuse further.
    """
    shape = reference.separated(gating, gate, up)[0].shape
    if gating.is_cast(gate) or not worth_compiling(shape, gate, up):
        return by_reference(reference.compute, gating, gate, up)
    if gating.variant.sparse:
        gating, gate, up = reference.sparsified(gating, gate, up)
    return _fused(gating.constants, gate, up)


swiglu = computed_by(compute, reference.swiglu)


def swiglu_formula(gate: Tensor, up: Tensor | None, *constants: Any) -> Tensor:
    """The reference as a formula to compile: tensors first, then the constants to compile in."""
    return reference.compute(Gating.of(constants), gate, up)


_fused = Compiled(swiglu_formula)
