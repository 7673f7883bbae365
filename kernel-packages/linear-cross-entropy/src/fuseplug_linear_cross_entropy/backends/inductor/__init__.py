"""The loss of a head by Inductor: torch computes the matmuls, and compiled programs everything between them.

The logits of a block of tokens lie in one buffer, in the dtype of the hidden states. Their gradient overwrites them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import worth_compiling

from ... import reference
from ...reference import Loss, Tokens
from .chunks import Head
from .differentiable import per_token, weighted_sum

_DTYPES = (torch.float32, torch.bfloat16)
"""Not float16: gradients that are made before their factor is known would underflow, and there is nothing to gain. On
two x86 cores, the matmuls of 1024 tokens of 32,000 words take 44 s in float16, and 0.25 s in bfloat16.
"""


def compute(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor | Tokens:
    """`fuseplug_linear_cross_entropy.reference.linear_cross_entropy`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding. Everything between the matmuls is computed in float32, so the result
    is usually closer to the exact one. Inside ``torch.compile``, ``torch.export`` and other tracers, the reference
    computes the call.
    """
    if loss.statistics:
        return compute_tokens(loss, hidden, weight, labels, bias)
    if not _serves(hidden, weight, labels, bias):
        return by_reference(reference.compute_loss, loss, hidden, weight, labels, bias)
    ignored = labels == loss.ignore_index
    head = Head(hidden, weight, bias, _columns(labels, ignored, len(weight)), loss.steps)
    smoothing, dtype = loss.label_smoothing, _dtype_of(loss, hidden)
    if smoothing is None or loss.reduction == "none":
        values = per_token(head)
        if smoothing is None:
            losses = -torch.stack((values.logprob, values.mean))
        else:
            losses = -(1 - smoothing) * values.logprob - smoothing * values.mean if smoothing else -values.logprob
        return losses.masked_fill(ignored, 0).to(dtype)
    counted = (~ignored).to(torch.float32)
    number = int(counted.sum()) if loss.reduction == "mean" else 1
    coefficient = counted / -max(number, 1)
    total = weighted_sum(head, (1 - smoothing) * coefficient, smoothing * coefficient)
    # Like torch's mean of nothing: NaN, and gradients of 0.
    return (total if number else total + math.nan).to(dtype)


def compute_tokens(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tokens:
    """`fuseplug_linear_cross_entropy.reference.linear_logprob`, fused: the same arguments, results and errors.

    All else is as for `linear_cross_entropy`.
    """
    if not _serves(hidden, weight, labels, bias):
        return by_reference(reference.compute_tokens, loss, hidden, weight, labels, bias)
    ignored, dtype = labels == loss.ignore_index, _dtype_of(loss, hidden)
    values = per_token(Head(hidden, weight, bias, _columns(labels, ignored, len(weight)), loss.steps))
    by_name = {name: getattr(values, name).masked_fill(ignored, 0) for name in ("logprob", *loss.statistics)}
    typed = {name: value.to(torch.bool if name == "is_top1" else dtype) for name, value in by_name.items()}
    return typed.pop("logprob"), typed


linear_cross_entropy = computed_by(compute, reference.linear_cross_entropy)
linear_logprob = computed_by(compute_tokens, reference.linear_logprob)


def _serves(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> bool:
    return (
        hidden.device.type == "cpu"
        and hidden.dtype in _DTYPES
        and worth_compiling((len(hidden), len(weight)), hidden, weight, labels, bias)
    )


def _columns(labels: Tensor, ignored: Tensor, words: int) -> Tensor:
    """*labels*, with 0 in the place of ignored ones."""
    columns = labels.masked_fill(ignored, 0)
    outside = (columns < 0) | (columns >= words)
    if outside.any():
        # The first sentence is torch's.
        raise IndexError(
            f"Target {int(columns[outside][0])} is out of bounds. Expected a row of weight, 0 to {words - 1}, or "
            "ignore_index"
        )
    return columns


def _dtype_of(loss: Loss, hidden: Tensor) -> torch.dtype:
    return torch.float32 if any(step.kind == "float" for step in loss.steps) else hidden.dtype
