"""RMSNorm on GPUs, by Triton: one pass over memory forward, one backward.

What is launched: forward one program, which reads x (and the gate) once and writes y once, and four bytes for each row
where a gradient is recorded. Backward one program, which reads x and the gradient of y (and the gate) once and writes
the gradient of x (and of the gate) once; with the gradient of a weight, and more than a few rows, one more that adds up
what the first one's programs found. The residual before a norm, and its gradient, go through the same two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import differentiated_again, recording, transparent, vjp

from ... import reference
from ...reference import Norming
from .launches import WIDEST, backward, forward

_MOST_GROUPS = (1 << 16) - 1
"""CUDA's limit on the second axis of a grid."""


def compute(norming: Norming, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
    """`fuseplug_rmsnorm.reference.rms_norm` on a GPU: the same arguments, result and errors.

    The result is the reference's up to rounding: a row is computed in float32 and rounded once. Rows that lie a stride
    apart are read where they are.

    For that call it is the reference: of other dtypes than float16, bfloat16 and float32; of empty tensors; of more
    than 2¹⁴ elements in a row or group; to tracers, functorch transforms and subclasses; and where autocast changes the
    variant. So is a backward that is to be differentiated again.
    """
    how, eps, group_size = norming
    autocast = how.autocast and torch.is_autocast_enabled(x.device.type)
    if autocast or not _serves(group_size or x.shape[-1], x, weight, gate):
        return by_reference(reference.compute, norming, x, weight, gate)
    if recording(x, weight, gate):
        y: Tensor = _RMSNorm.apply(x, weight, gate, eps, how.name, group_size)  # type: ignore[no-untyped-call]
        return y
    return forward(x, None, weight, gate, eps, how.name, group_size, False)[0]  # type: ignore[no-any-return]


rms_norm = computed_by(compute, reference.rms_norm)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    """`fuseplug_rmsnorm.reference.add_rms_norm` on a GPU, in one launch: the same arguments, results and errors.

    Where `rms_norm` would be the reference, and where *residual* has another dtype than *x*, it is the addition and
    `rms_norm`.
    """
    how = reference.check_sum(x, residual, weight, variant)
    autocast = how.autocast and torch.is_autocast_enabled(x.device.type)
    if autocast or residual.dtype is not x.dtype or not _serves(x.shape[-1], x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps, variant=variant, norm=rms_norm)
    if recording(x, residual, weight):
        y, total = _AddRMSNorm.apply(x, residual, weight, eps, variant)  # type: ignore[no-untyped-call]
    else:
        y, total = forward(x, residual, weight, None, eps, variant, None, False)
    return y, total


def _serves(width: int, x: Tensor, *others: Tensor | None) -> bool:
    return (
        width <= WIDEST
        and x.shape[-1] <= width * _MOST_GROUPS
        and x.numel() > 0
        and have_model_dtypes(x, *others)
        and transparent(x, *others)
    )


class _RMSNorm(torch.autograd.Function):
    """A backward that is to be differentiated again is the reference's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        gate: Tensor | None,
        eps: float,
        variant: str,
        group_size: int | None,
    ) -> Tensor:
        y, rstd = forward(x, None, weight, gate, eps, variant, group_size, True)
        ctx.save_for_backward(x, weight, gate, rstd)
        ctx.constants = eps, variant, group_size
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate, rstd = ctx.saved_tensors
        eps, variant, group_size = ctx.constants
        wanted = ctx.needs_input_grad[:3]
        if differentiated_again() or not transparent(dy, x):
            norming = Norming.of(variant, eps, group_size)
            found = vjp(
                lambda x, weight, gate: reference.compute(norming, x, weight, gate),
                (x, weight, gate),
                wanted,
                (dy,),
            )
        else:
            found = _spread(wanted, backward(dy, None, x, weight, gate, rstd, variant, group_size, wanted))
        return (*found, None, None, None)


class _AddRMSNorm(torch.autograd.Function):
    """x and *residual* have one gradient: that of the sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, variant: str
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y, total, rstd = forward(x, residual, weight, None, eps, variant, None, True)
        ctx.save_for_backward(total, weight, rstd)
        ctx.constants = eps, variant
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        eps, variant = ctx.constants
        x_wanted, residual_wanted, weight_wanted = ctx.needs_input_grad[:3]
        wanted = (x_wanted or residual_wanted, weight_wanted, False)
        if dy is None:
            found = [dtotal, None]
        elif differentiated_again() or not transparent(dy, dtotal, total):
            norming = Norming.of(variant, eps, None)
            found = vjp(
                lambda total, weight: (reference.compute(norming, total, weight, None), total),
                (total, weight),
                wanted[:2],
                (dy, torch.zeros_like(total) if dtotal is None else dtotal),
            )
        else:
            found = _spread(wanted, backward(dy, dtotal, total, weight, None, rstd, variant, None, wanted))
        grad, grad_weight = found[:2]
        return grad if x_wanted else None, grad if residual_wanted else None, grad_weight, None, None


def _spread(wanted: tuple[bool, ...], found: list[Tensor]) -> list[Tensor | None]:
    rest = iter(found)
    return [next(rest) if need else None for need in wanted]
