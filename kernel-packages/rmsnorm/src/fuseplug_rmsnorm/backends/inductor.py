"""RMSNorm as Inductor compiles it, on every device Inductor knows, the CPU included."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug.functional import computed_by
from fuseplug.inductor import Compiled, keeping_order, plain
from fuseplug.torch_private import get_tracing_state

from .. import reference
from ..reference import Norming

_LARGE = 1 << 16
_LARGE_FOR_FLOAT32_FORWARD = 1 << 19
"""Elements of x from which a compiled call is worth its fixed cost, which is about 45 µs forward and 100 µs backward.

On two x86 cores, in µs, eager and compiled: bfloat16 forward 33 and 45 at 2¹⁵ elements, 89 and 58 at 2¹⁸; forward and
backward 142 and 165, 395 and 242. In float32 the forward alone loses at 2¹⁸, 60 and 63, and gains at 2²², 1961 and 863.
"""


def compute(norming: Norming, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
    """`fuseplug_rmsnorm.reference.rms_norm`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding: intermediate roundings to a half type are left out, so it is as a rule
    nearer to the exact one. Inside ``torch.compile``, ``torch.export`` and other tracers it *is* the reference, for the
    compiler around it to fuse further.
    """
    if torch.compiler.is_compiling() or get_tracing_state() is not None:
        return reference.compute(norming, x, weight, gate)
    how = norming.how
    autocast = torch.is_autocast_enabled(x.device.type)
    if not (autocast and how.autocast) and _is_large(x, norming.group_size) and plain(x, weight, gate):
        return _fused(norming.constants, x, weight, gate)
    if autocast or not how.upcast or how.native:
        return reference.compute(norming, x, weight, gate)

    def eager(x: Tensor, gate: Tensor | None) -> Tensor:
        return _eager(norming, x, weight, gate)

    return keeping_order(eager, x, gate)


rms_norm = computed_by(compute, reference.rms_norm)
add_rms_norm = functools.partial(reference.add_rms_norm, norm=rms_norm)


def rms_norm_formula(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, variant: str, eps: float, group_size: int | None
) -> Tensor:
    """The reference as a formula to compile: tensors first, then what is compiled in."""
    return reference.compute(Norming.of(variant, eps, group_size), x, weight, gate)


_fused = Compiled(rms_norm_formula)


def _is_large(x: Tensor, group_size: int | None) -> bool:
    size = x.numel()
    if size < _LARGE:
        return False
    # One row, and rows of one element, are sizes that Dynamo would compile once more for.
    if x.shape[-1] in (1, size) or group_size == 1:
        return False
    return size >= _LARGE_FOR_FLOAT32_FORWARD or x.element_size() == 2 or (x.requires_grad and torch.is_grad_enabled())


def _eager(norming: Norming, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
    """With torch's own `rms_norm`: the fewest calls, computed in float32, rounded once where variants round twice.

    Bitwise what ``"cast-last"`` is on the CPU. For the others it differs from the reference by roundings only, and
    towards the exact result, as the compiled program does; so a module's numbers do not change kind with the number of
    tokens.
    """
    how, eps, group_size = norming
    if how.gate is not None or group_size is not None or how.weight == "input":
        return reference.compute(norming, x, weight, gate, _native_unit)
    if weight is None or (weight.dtype is x.dtype and how.offset is None):
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    wide = reference.wide_dtype(x, how)
    y = functional.rms_norm(x.to(wide), x.shape[-1:], reference.scale(weight, wide, how), eps)
    return y.to(reference.result_dtype(x, weight, how))


def _native_unit(norming: Norming, _x: Tensor, source: Tensor, _weight: Tensor | None) -> Tensor:
    grouped = reference.in_groups(source, norming.group_size)
    return functional.rms_norm(grouped, grouped.shape[-1:], None, norming.eps).view(source.shape)
