"""The linear cross-entropy by Liger, whose forward makes the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import differentiable, recording, transparent
from fuseplug_linear_cross_entropy import reference
from fuseplug_linear_cross_entropy.backends.folded import folded
from fuseplug_linear_cross_entropy.reference import Loss, Tokens

from .launching import launch, serves


def compute(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor | Tokens:
    """`fuseplug_linear_cross_entropy.reference.linear_cross_entropy` by Liger: the same arguments, result and errors.

    The result is the reference's up to rounding. To multiply logits by a number, a step that Liger does not have, the
    hidden states and the bias are multiplied. The weight's gradient is added up in float32. In float16, and without a
    reduction, the backward makes the gradients and computes the logits again: the gradients of a mean are too small for
    float16.

    The reference computes calls with statistics, which Liger does not compute; with a label that is neither ignored nor
    a row of *weight*, for which Liger would write into other memory (the host waits for the device to find out); with
    two tanh steps; with dtypes other than float16, bfloat16 and float32; with empty tensors; and for tracers, functorch
    transforms and tensor subclasses. It also computes a backward that is to be differentiated again.
    """
    steps = None if loss.statistics else folded(loss.steps)
    if (
        steps is None
        or not serves(hidden, weight, bias)
        or not transparent(hidden, labels)
        or not _labelled(loss, labels, weight)
    ):
        return by_reference(reference.compute, loss, hidden, weight, labels, bias)
    if loss.label_smoothing is None:
        ends: Any = [compute(loss._replace(label_smoothing=end), hidden, weight, labels, bias) for end in (0.0, 1.0)]
        return torch.stack(ends)
    factor = steps.inner * steps.outer if steps.capped else steps.outer
    form = _Form(loss, steps.outer if steps.capped else None, factor)
    by_token = loss.reduction == "none" or (hidden.dtype is torch.float16 and recording(hidden, weight, bias))
    result: Tensor = (_per_token if by_token else _reduced)(form, hidden, weight, bias, labels)
    if by_token and loss.reduction != "none":
        result = result.sum()
        if loss.reduction == "mean":
            result = result / (labels != loss.ignore_index).sum()
    elif loss.reduction == "mean":
        # If no token counts, Liger's mean is 0, and torch's is NaN.
        result = torch.where((labels != loss.ignore_index).any(), result, math.nan)
    wide = reference.FLOAT.kind in [step.kind for step in loss.steps]
    return result.to(torch.float32 if wide else hidden.dtype)


linear_cross_entropy = computed_by(compute, reference.linear_cross_entropy)


class _Form(NamedTuple):
    """The arguments that are not tensors.

    Attributes:
        loss: The loss, for the reference.
        cap: The logits are kept within ±cap; ``None`` if they are not.
        factor: The number by which the logits are first multiplied.
    """

    loss: Loss
    cap: float | None
    factor: float


def _labelled(loss: Loss, labels: Tensor, weight: Tensor) -> bool:
    """Whether every label that counts is a row of *weight*."""
    outside = (labels < 0) | (labels >= len(weight))
    return not bool((outside & (labels != loss.ignore_index)).any())


def _called(
    form: _Form,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    reduction: str,
    wanted: Sequence[bool],
    upstream: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss, and the *wanted* gradients of hidden, weight and bias; those of hidden and bias if any is wanted."""
    if form.factor != 1.0:
        hidden, bias = hidden * form.factor, None if bias is None else bias * form.factor
    results = launch(
        fused_linear_cross_entropy_forward,
        hidden,
        hidden,
        weight,
        labels.contiguous(),
        bias=bias,
        ignore_index=form.loss.ignore_index,
        label_smoothing=form.loss.label_smoothing,
        reduction=reduction,
        softcap=form.cap,
        accum_dtype=torch.float32,
        token_grad_output=upstream,
        # By itself, Liger looks at hidden only, and makes no gradient of the weight if hidden needs none.
        compute_gradients=any(wanted),
        weight_requires_grad=any(wanted[1:2]),
    )
    of_hidden, of_weight, of_bias = results[4:7]
    if form.factor != 1.0 and any(wanted):
        of_hidden, of_bias = of_hidden * form.factor, None if of_bias is None else of_bias * form.factor
    return results[0], of_hidden, of_weight, of_bias


def _reduced_forward(
    form: _Form, needs: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The loss, and its gradients, which the forward makes."""
    value, *gradients = _called(form, hidden, weight, labels, bias, form.loss.reduction, needs[:3])
    return value, _needed(gradients, needs)


def _reduced_backward(form: _Form, needs: Sequence[bool], upstream: Tensor, *saved: Tensor) -> list[Tensor]:
    """The saved gradients, scaled. They are in new memory, because the graph may be kept."""
    del form
    return [(gradient * upstream).to(gradient.dtype) for gradient in saved[: sum(needs)]]


def _formula(form: _Form, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """The same loss from operations that can be differentiated again, in float32 like Liger's."""
    return reference.compute_loss(form.loss, hidden, weight, labels, bias).float()


_reduced = differentiable(_reduced_forward, _reduced_backward, _formula)


def _per_token_forward(
    form: _Form, _: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, tuple[()]]:
    return _called(form, hidden, weight, labels, bias, "none", ())[0], ()


def _per_token_backward(
    form: _Form,
    needs: Sequence[bool],
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
) -> list[Tensor]:
    """The wanted gradients. The logits are computed again."""
    with torch.autocast(hidden.device.type, enabled=False):
        gradients = _called(form, hidden, weight, labels, bias, "none", needs[:3], upstream.contiguous())[1:]
    return _needed(gradients, needs)


def _formula_per_token(form: _Form, *tensors: Any) -> Tensor:
    return _formula(form._replace(loss=form.loss._replace(reduction="none")), *tensors)


_per_token = differentiable(_per_token_forward, _per_token_backward, _formula_per_token)


def _needed(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    return [gradient for gradient, need in zip(gradients, needs, strict=False) if need and gradient is not None]
