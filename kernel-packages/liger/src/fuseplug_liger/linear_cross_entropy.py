"""The linear cross-entropy by Liger, which makes the gradients in the forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import differentiated_again, transparent, vjp
from fuseplug_linear_cross_entropy import reference
from fuseplug_linear_cross_entropy.backends.folded import folded
from fuseplug_linear_cross_entropy.reference import Loss

from .launching import launch, serves


def compute(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
    """`fuseplug_linear_cross_entropy.reference.linear_cross_entropy` by Liger: the same arguments, result and errors.

    The result is the reference's up to rounding. Logits that are multiplied by a number are those of hidden states that
    are: Liger has no such step. The weight's gradient is added up in float32. In float16, and without a reduction, the
    gradients are made in the backward, which computes the logits anew: those of a mean are too small for that dtype.

    For these calls it is the reference: a label that is no row of *weight*, for which Liger would write elsewhere (the
    host waits for the device to know); two tanh one after the other; other dtypes than float16, bfloat16 and float32;
    empty tensors; tracers, functorch transforms and subclasses. So is a backward that is to be differentiated again.
    """
    steps = folded(loss.steps)
    if (
        steps is None
        or not serves(hidden, weight, bias)
        or not transparent(hidden, labels)
        or not _labelled(loss, labels, weight)
    ):
        return by_reference(reference.compute, loss, hidden, weight, labels, bias)
    if loss.label_smoothing is None:
        ends = [compute(loss._replace(label_smoothing=each), hidden, weight, labels, bias) for each in (0.0, 1.0)]
        return torch.stack(ends)
    factor = steps.inner * steps.outer if steps.capped else steps.outer
    how = _How(loss, steps.outer if steps.capped else None, factor)
    wanted = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (hidden, weight, bias)]
    each = loss.reduction == "none" or (hidden.dtype is torch.float16 and any(wanted))
    if not any(wanted):
        result = _called(how, hidden, weight, labels, bias, loss.reduction, wanted)[0]
    elif each:
        result = _PerToken.apply(hidden, weight, bias, labels, how)  # type: ignore[no-untyped-call]
    else:
        result = _Reduced.apply(hidden, weight, bias, labels, how, wanted)  # type: ignore[no-untyped-call]
    if each and loss.reduction != "none":
        result = result.sum()
        if loss.reduction == "mean":
            result = result / (labels != loss.ignore_index).sum()
    elif loss.reduction == "mean":
        # Of no token Liger's mean is 0, and torch's is NaN.
        result = torch.where((labels != loss.ignore_index).any(), result, math.nan)
    wide = reference.FLOAT.kind in [step.kind for step in loss.steps]
    return result.to(torch.float32 if wide else hidden.dtype)


linear_cross_entropy = computed_by(compute, reference.linear_cross_entropy)


class _How(NamedTuple):
    """What is not a tensor.

    Attributes:
        loss: As the reference has it.
        cap: The logits are kept within ±cap; ``None`` if they are not.
        factor: What the logits are multiplied by first.
    """

    loss: Loss
    cap: float | None
    factor: float


def _labelled(loss: Loss, labels: Tensor, weight: Tensor) -> bool:
    """Whether every label that counts is a row of *weight*."""
    outside = (labels < 0) | (labels >= len(weight))
    return not bool((outside & (labels != loss.ignore_index)).any())


def _called(
    how: _How,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    reduction: str,
    wanted: Sequence[bool],
    upstream: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss, and the gradients of hidden, weight and bias that are *wanted*: of hidden and bias, if any is."""
    if how.factor != 1.0:
        hidden, bias = hidden * how.factor, None if bias is None else bias * how.factor
    found = launch(
        fused_linear_cross_entropy_forward,
        hidden,
        hidden,
        weight,
        labels.contiguous(),
        bias=bias,
        ignore_index=how.loss.ignore_index,
        label_smoothing=how.loss.label_smoothing,
        reduction=reduction,
        softcap=how.cap,
        accum_dtype=torch.float32,
        token_grad_output=upstream,
        # Liger would go by hidden alone, and make none of the weight where hidden needs none.
        compute_gradients=any(wanted),
        weight_requires_grad=wanted[1],
    )
    of_hidden, of_weight, of_bias = found[4:7]
    if how.factor != 1.0 and any(wanted):
        of_hidden, of_bias = of_hidden * how.factor, None if of_bias is None else of_bias * how.factor
    return found[0], of_hidden, of_weight, of_bias


class _Reduced(torch.autograd.Function):
    """The gradients are made in the forward; the backward scales them, in new memory: the graph may be kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        how: _How,
        wanted: Sequence[bool],
    ) -> Tensor:
        value, *gradients = _called(how, hidden, weight, labels, bias, how.loss.reduction, wanted)
        kept = [each if need else None for each, need in zip(gradients, wanted, strict=True)]
        ctx.how = how
        ctx.save_for_backward(hidden, weight, bias, labels, *kept)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, *gradients = ctx.saved_tensors
        wanted, how = ctx.needs_input_grad[:3], ctx.how
        if differentiated_again() or not transparent(upstream, hidden):
            found = vjp(
                lambda *tensors: _formula(how, how.loss.reduction, labels, *tensors),
                (hidden, weight, bias),
                wanted,
                (upstream,),
            )
        else:
            found = [
                (each * upstream).to(each.dtype) if need else None for each, need in zip(gradients, wanted, strict=True)
            ]
        return *found, None, None, None


class _PerToken(torch.autograd.Function):
    """The loss of each token. Its backward computes the logits anew."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(hidden, weight, bias, labels)
        return _called(how, hidden, weight, labels, bias, "none", (False, False, False))[0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        wanted, how = ctx.needs_input_grad[:3], ctx.how
        if differentiated_again() or not transparent(upstream, hidden):
            found = vjp(
                lambda *tensors: _formula(how, "none", labels, *tensors), (hidden, weight, bias), wanted, (upstream,)
            )
        else:
            with torch.autocast(hidden.device.type, enabled=False):
                gradients = _called(how, hidden, weight, labels, bias, "none", wanted, upstream.contiguous())[1:]
            found = [each if need else None for each, need in zip(gradients, wanted, strict=True)]
        return *found, None, None


def _formula(how: _How, reduction: Any, labels: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What is computed in operations that can be differentiated again, in float32 as Liger's loss is."""
    loss = how.loss._replace(reduction=reduction)
    return reference.compute(loss, hidden, weight, labels, bias).float()
