"""RMSNorm compiled by Inductor, on every device that Inductor knows, including the CPU."""

from __future__ import annotations

import functools

from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import Compiled, worth_compiling

from .. import reference
from ..reference import Norming


def compute(norming: Norming, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
    """`fuseplug_rmsnorm.reference.rms_norm`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding. Intermediate roundings to a half type are left out, so the result is
    as a rule closer to the exact one. Inside ``torch.compile``, ``torch.export`` and other tracers, the reference
    computes, for the compiler around it to fuse further.
    """
    if norming.variant.is_cast(x) or not worth_compiling(x.shape, x, weight, gate):
        return by_reference(reference.compute, norming, x, weight, gate)
    return _fused(norming.constants, x, weight, gate)


rms_norm = computed_by(compute, reference.rms_norm)
add_rms_norm = functools.partial(reference.add_rms_norm, norm=rms_norm)


def rms_norm_formula(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, variant: str, eps: float, group_size: int | None
) -> Tensor:
    """The reference as a formula to compile: tensors first, then the constants to compile in."""
    return reference.compute(Norming.of(variant, eps, group_size), x, weight, gate)


_fused = Compiled(rms_norm_formula)
