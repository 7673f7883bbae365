"""The loss on GPUs: matmuls by torch, and all between them by Triton, for some tokens at a time.

What is done for each chunk of tokens: a matmul writes its logits; one program reads them, and reads them again to put
their gradient in their place; two matmuls make the gradients of hidden and weight of it. Nothing waits for the device.

The gradients of a mean or a sum are made in the forward, where each logit is computed once. The backward scales them.
Without a reduction, and for log-probabilities, the gradient of each token is known in the backward only, which computes
the logits anew. So it is for float16: there the gradient of a mean is too small for its dtype unless the loss is
scaled, and by how much is in the gradient of the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuseplug.functional import computed_by
from fuseplug.triton import recording, transparent

from ... import reference
from ...reference import LogProbs, Loss
from ..folded import folded
from .launches import Terms, differentiate, measure, measure_and_differentiate, scale

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def compute(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
    """`fuseplug_linear_cross_entropy.reference.linear_cross_entropy` on a GPU: the same arguments, result and errors.

    The result is the reference's up to rounding: all between the matmuls is computed in float32. A gradient cannot be
    differentiated again. A label outside of the vocabulary makes the loss NaN, because an error would be waited for.

    For that call it is the reference: of other dtypes than float16, bfloat16 and float32; of empty tensors; of two tanh
    one after the other; to tracers, functorch transforms and subclasses.
    """
    smoothing = loss.label_smoothing
    terms = _terms(loss, smoothing - 1.0, -smoothing)
    if terms is None or not _serves(hidden, weight, labels, bias):
        return reference.compute(loss, hidden, weight, labels, bias)
    dtype = _result_dtype(loss, hidden)
    if loss.reduction == "none":
        return _measured(terms, False, hidden, weight, labels, bias)[0].to(dtype)
    count = (labels != loss.ignore_index).sum() if loss.reduction == "mean" else None
    if hidden.dtype is not torch.float16 and recording(hidden, weight, bias):
        upstream = hidden.new_ones((), dtype=torch.float32) if count is None else count.float().reciprocal()
        wanted = [t is not None and t.requires_grad for t in (hidden, weight, bias)]
        total: Tensor = _Reduced.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, labels, upstream.expand(len(labels)), count, terms, wanted
        )
        return total.to(dtype)
    total = _measured(terms, False, hidden, weight, labels, bias)[0].sum()
    return (total if count is None else total / count).to(dtype)


def compute_logprob(
    loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *, entropy: bool
) -> LogProbs:
    """`fuseplug_linear_cross_entropy.reference.linear_logprob` on a GPU: the same arguments, result and errors.

    All else is as for `linear_cross_entropy`.
    """
    terms = _terms(loss, 1.0, 0.0)
    if terms is None or not _serves(hidden, weight, labels, bias):
        return reference.compute_logprob(loss, hidden, weight, labels, bias, entropy=entropy)
    found = [each.to(_result_dtype(loss, hidden)) for each in _measured(terms, entropy, hidden, weight, labels, bias)]
    return LogProbs(found[0], found[1] if entropy else None)


linear_cross_entropy = computed_by(compute, reference.linear_cross_entropy)
linear_logprob = computed_by(compute_logprob, reference.linear_logprob)


def _terms(loss: Loss, picked: float, spread: float) -> Terms | None:
    how = folded(loss.steps)
    return None if how is None else Terms(loss.ignore_index, picked, spread, *how)


def _serves(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> bool:
    return (
        hidden.dtype in _DTYPES
        and hidden.numel() > 0
        and weight.numel() > 0
        and transparent(hidden, weight, labels, bias)
    )


def _result_dtype(loss: Loss, hidden: Tensor) -> torch.dtype:
    return torch.float32 if reference.FLOAT.kind in [step.kind for step in loss.steps] else hidden.dtype


def _measured(
    terms: Terms, entropy: bool, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """The value of each token, and its entropy if that is asked for."""
    if recording(hidden, weight, bias):
        found: tuple[Tensor, ...] = _Measured.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, labels, terms, entropy
        )
        return found
    value, _, *entropies = measure(hidden, weight, labels, bias, *terms, entropy)
    return value, *entropies


class _Measured(torch.autograd.Function):
    """The backward computes the logits anew."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: Terms, entropy: bool
    ) -> tuple[Tensor, ...]:
        value, lse, *entropies = measure(hidden, weight, labels, bias, *terms, entropy)
        ctx.terms = terms
        ctx.save_for_backward(hidden, weight, bias, labels, lse, *entropies)
        return value, *entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, of_entropy: Tensor | None = None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, *entropies = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        found = differentiate(
            hidden, weight, labels, bias, upstream, lse, of_entropy, next(iter(entropies), None), *ctx.terms, wanted
        )
        return *_spread(wanted, found), None, None, None


class _Reduced(torch.autograd.Function):
    """The gradients are those of the forward, scaled."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        upstream: Tensor,
        count: Tensor | None,
        terms: Terms,
        wanted: list[bool],
    ) -> Tensor:
        value, *gradients = measure_and_differentiate(hidden, weight, labels, bias, upstream, *terms, wanted)
        ctx.wanted = wanted
        ctx.save_for_backward(*gradients)
        total: Tensor = value.sum()
        return total if count is None else total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = [scale(gradient, upstream) for gradient in ctx.saved_tensors]
        return *_spread(ctx.wanted, found), None, None, None, None, None


def _spread(wanted: list[bool], found: list[Tensor]) -> list[Tensor | None]:
    rest = iter(found)
    return [next(rest) if need else None for need in wanted]
