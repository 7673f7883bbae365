"""RMSNorm as Inductor compiles it, on every device Inductor knows, the CPU included."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from ._compiled import Compiled, plain
from .reference import Semantics

_WORTH_A_COMPILED_CALL = 1 << 16
"""Elements of x from which the compiled program wins; below, its start costs more than it saves."""


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    variant: str = "llama",
    gate: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor:
    """`fuseplug_rmsnorm.reference.rms_norm`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding: intermediate roundings to a half type are left out, so it is as a rule
    nearer to the exact one. Inside ``torch.compile``, ``torch.export`` and other tracers it *is* the reference, for the
    compiler around it to fuse further.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return reference.rms_norm(x, weight, eps, variant=variant, gate=gate, group_size=group_size)
    how = reference.check(x, weight, variant, gate, group_size)
    autocast = torch.is_autocast_enabled(x.device.type)
    if not (autocast and how.autocast) and _is_large(x, group_size) and plain(x, weight, gate):
        return _fused((variant, float(eps), group_size), x, weight, gate)
    if autocast or not how.upcast or how.native:
        return reference.compute(how, x, weight, eps, gate, group_size)
    return _small(how, x, weight, eps, gate, group_size)


def rms_norm_formula(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, variant: str, eps: float, group_size: int | None
) -> Tensor:
    return reference.compute(reference.VARIANTS[variant], x, weight, eps, gate, group_size)


_fused = Compiled(rms_norm_formula)


def _is_large(x: Tensor, group_size: int | None) -> bool:
    size, width = x.numel(), x.shape[-1]
    # One row, and rows of one element, are sizes that Dynamo would compile once more for.
    return size >= _WORTH_A_COMPILED_CALL and size > width > 1 and group_size != 1


def _small(
    how: Semantics, x: Tensor, weight: Tensor | None, eps: float, gate: Tensor | None, group_size: int | None
) -> Tensor:
    """With torch's own `rms_norm`: the fewest calls, computed in float32, rounded once where variants round twice.

    Bitwise what ``"cast-last"`` is on the CPU. For the others it differs from the reference by roundings only, and
    towards the exact result, as the compiled program does; so a module's numbers do not change kind with the number of
    tokens.
    """
    if how.gate is not None or group_size is not None or how.weight == "input":
        return reference.compute(how, x, weight, eps, gate, group_size, _native_unit)
    if weight is None or (weight.dtype is x.dtype and how.offset is None):
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    wide = reference.wide_dtype(x, how)
    y = functional.rms_norm(x.to(wide), x.shape[-1:], reference.scale(weight, wide, how), eps)
    return y.to(reference.result_dtype(x, weight, how))


def _native_unit(
    x: Tensor, source: Tensor, weight: Tensor | None, eps: float, group_size: int | None, how: Semantics
) -> Tensor:
    if group_size is None:
        return functional.rms_norm(source, source.shape[-1:], None, eps)
    return functional.rms_norm(source.unflatten(-1, (-1, group_size)), (group_size,), None, eps).flatten(-2)
