"""RMSNorm on GPUs, by Triton: one pass over memory forward, one backward.

The forward is one launch, which reads x (and the gate) once and writes y once, and four bytes for each row if a
gradient is recorded. The backward is one launch, which reads x and the gradient of y (and the gate) once and writes the
gradient of x (and of the gate) once. For the gradient of a weight over more than a few rows, a second launch adds up
the sums that the programs of the first one found. The residual before a norm, and its gradient, go through the same
forward and backward launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import differentiable, differentiated_again, recording, transparent, vjp

from ... import reference
from ...reference import Norming
from .launches import WIDEST, backward, forward

_MOST_GROUPS = (1 << 16) - 1
"""CUDA's limit on the second axis of a grid."""


def compute(norming: Norming, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
    """`fuseplug_rmsnorm.reference.rms_norm` on a GPU: the same arguments, result and errors.

    The result is the reference's up to rounding: a row is computed in float32 and rounded once. Rows that lie a stride
    apart are read where they are.

    The reference computes a call with dtypes other than float16, bfloat16 and float32; with empty tensors; with more
    than 2¹⁴ elements in a row or group; for tracers, functorch transforms and subclasses; and where autocast changes
    the variant. It also computes a backward that is to be differentiated again.
    """
    if norming.variant.is_cast(x) or not _serves(norming.group_size or x.shape[-1], x, weight, gate):
        return by_reference(reference.compute, norming, x, weight, gate)
    y: Tensor = _fused(norming, x, weight, gate)
    # A row of y is one piece. If that of x is not, a caller may view the result in a shape that only x allows.
    return y if x.stride(-1) == 1 else torch.empty_like(x, dtype=y.dtype).copy_(y)


rms_norm = computed_by(compute, reference.rms_norm)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    """`fuseplug_rmsnorm.reference.add_rms_norm` on a GPU, in one launch: the same arguments, results and errors.

    Where the reference would compute `rms_norm`, where *residual* has another dtype than *x*, and where a row of *x* is
    not one piece of memory, this function adds and calls `rms_norm`.
    """
    row = reference.check_sum(x, residual, weight, variant)
    alike = residual.dtype is x.dtype and x.stride(-1) == 1
    if row.is_cast(x) or not (alike and _serves(x.shape[-1], x, residual, weight)):
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


def _forward(
    norming: Norming, needs: Sequence[bool], x: Tensor, weight: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Sequence[Tensor]]:
    variant, eps, group_size = norming
    y, *rstd = forward(x, None, weight, gate, eps, variant.name, group_size, bool(needs))
    return y, rstd


def _backward(norming: Norming, needs: Sequence[bool], dy: Tensor, rstd: Tensor, *tensors: Tensor | None) -> Any:
    return backward(dy, None, *tensors, rstd, norming.variant.name, norming.group_size, needs)


_fused = differentiable(_forward, _backward, reference.compute)


class _AddRMSNorm(torch.autograd.Function):
    """x and *residual* have the same gradient: that of the sum."""

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
            gradients = [dtotal, None]
        elif differentiated_again() or not transparent(dy, dtotal, total):
            norming = Norming.of(variant, eps, None)
            gradients = vjp(
                lambda total, weight: (reference.compute(norming, total, weight, None), total),
                (total, weight),
                wanted[:2],
                (dy, torch.zeros_like(total) if dtotal is None else dtotal),
            )
        else:
            launched = iter(backward(dy, dtotal, total, weight, None, rstd, variant, None, wanted))
            gradients = [next(launched) if need else None for need in wanted[:2]]
        grad, grad_weight = gradients
        return grad if x_wanted else None, grad if residual_wanted else None, grad_weight, None, None
