"""The loss on GPUs: matmuls by torch, and all between them by Triton, for some tokens at a time.

What is done for each chunk of tokens: a matmul writes its logits; one program reads them, and reads them again to put
their gradient in their place; two matmuls make the gradients of hidden and weight of it. Nothing waits for the device.

The gradients of a mean or a sum are made in the forward, where each logit is computed once. The backward scales them.
Without a reduction, and for log-probabilities, the gradient of each token is known in the backward only, which computes
the logits anew. So it is for float16: there the gradient of a mean is too small for its dtype unless the loss is
scaled, and by how much is in the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug.functional import computed_by
from fuseplug.triton import differentiated_again, recording, transparent, vjp

from ... import reference
from ...reference import LogProbs, Loss
from ..folded import folded
from .launches import Terms, differentiate, measure, measure_and_differentiate, scale

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def compute(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
    """`fuseplug_linear_cross_entropy.reference.linear_cross_entropy` on a GPU: the same arguments, result and errors.

    The result is the reference's up to rounding: all between the matmuls is computed in float32. A label outside of
    the vocabulary makes the loss NaN, because an error would be waited for.

    For that call it is the reference: of other dtypes than float16, bfloat16 and float32; of empty tensors; of two tanh
    one after the other; to tracers, functorch transforms and subclasses. So is a backward that is to be differentiated
    again.
    """
    how = _how(loss, hidden, None)
    if how is None or not _serves(hidden, weight, labels, bias):
        return reference.compute(loss, hidden, weight, labels, bias)
    if loss.reduction == "none":
        return _measured(how, hidden, weight, labels, bias)[0]
    if hidden.dtype is not torch.float16 and recording(hidden, weight, bias):
        wanted = [t is not None and t.requires_grad for t in (hidden, weight, bias)]
        result: Tensor = _Reduced.apply(hidden, weight, bias, labels, how, wanted)  # type: ignore[no-untyped-call]
        return result
    wide = how._replace(dtype=torch.float32)
    total = _measured(wide, hidden, weight, labels, bias)[0].sum()
    return _reduced(how, total, _count(how, labels))


def compute_logprob(
    loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *, entropy: bool
) -> LogProbs:
    """`fuseplug_linear_cross_entropy.reference.linear_logprob` on a GPU: the same arguments, result and errors.

    All else is as for `linear_cross_entropy`.
    """
    how = _how(loss, hidden, entropy)
    if how is None or not _serves(hidden, weight, labels, bias):
        return reference.compute_logprob(loss, hidden, weight, labels, bias, entropy=entropy)
    found = _measured(how, hidden, weight, labels, bias)
    return LogProbs(found[0], found[1] if entropy else None)


linear_cross_entropy = computed_by(compute, reference.linear_cross_entropy)
linear_logprob = computed_by(compute_logprob, reference.linear_logprob)


class _How(NamedTuple):
    """What is not a tensor.

    Attributes:
        loss: As the reference has it.
        terms: As the programs have it.
        dtype: Of the result.
        entropy: For log-probabilities, whether there is an entropy too; ``None`` for a loss.
    """

    loss: Loss
    terms: Terms
    dtype: torch.dtype
    entropy: bool | None


def _how(loss: Loss, hidden: Tensor, entropy: bool | None) -> _How | None:
    """``None`` for steps that the programs do not have."""
    steps = folded(loss.steps)
    if steps is None:
        return None
    of_label, of_all = (loss.label_smoothing - 1.0, -loss.label_smoothing) if entropy is None else (1.0, 0.0)
    wide = reference.FLOAT.kind in [step.kind for step in loss.steps]
    dtype = torch.float32 if wide else hidden.dtype
    return _How(loss, Terms(loss.ignore_index, of_label, of_all, *steps), dtype, entropy)


def _serves(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> bool:
    return (
        hidden.dtype in _DTYPES
        and hidden.numel() > 0
        and weight.numel() > 0
        and transparent(hidden, weight, labels, bias)
    )


def _count(how: _How, labels: Tensor) -> Tensor | None:
    """What the sum over tokens is divided by."""
    return (labels != how.loss.ignore_index).sum() if how.loss.reduction == "mean" else None


def _reduced(how: _How, total: Tensor, count: Tensor | None) -> Tensor:
    return (total if count is None else total / count).to(how.dtype)


def _measured(how: _How, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The loss of each token, or its log-probability, and its entropy if that is asked for."""
    if recording(hidden, weight, bias):
        recorded: tuple[Tensor, ...] = _Measured.apply(hidden, weight, bias, labels, how)  # type: ignore[no-untyped-call]
        return recorded
    value, _, *entropies = measure(hidden, weight, labels, bias, *how.terms, bool(how.entropy))
    return tuple([each.to(how.dtype) for each in (value, *entropies)])


class _Measured(torch.autograd.Function):
    """The backward computes the logits anew."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How
    ) -> tuple[Tensor, ...]:
        value, lse, *entropies = measure(hidden, weight, labels, bias, *how.terms, bool(how.entropy))
        ctx.how = how
        ctx.save_for_backward(hidden, weight, bias, labels, lse, *entropies)
        return tuple([each.to(how.dtype) for each in (value, *entropies)])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, *entropies = ctx.saved_tensors
        how, wanted = ctx.how, list(ctx.needs_input_grad[:3])
        if differentiated_again() or not transparent(*upstream, hidden):
            needs = [*wanted, False, False]
            return tuple(vjp(_formula, (hidden, weight, bias, labels, how), needs, upstream))
        of_value, *of_entropy = [each.float() for each in upstream]
        rest = (next(iter(of_entropy), None), next(iter(entropies), None), *how.terms, wanted)
        found = differentiate(hidden, weight, labels, bias, of_value, lse, *rest)
        return *_spread(wanted, found), None, None


def _formula(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How) -> tuple[Tensor, ...]:
    """What `_Measured` computes, in operations that can be differentiated again."""
    if how.entropy is None:
        return (reference.compute(how.loss._replace(reduction="none"), hidden, weight, labels, bias).to(how.dtype),)
    found = reference.compute_logprob(how.loss, hidden, weight, labels, bias, entropy=how.entropy)
    return tuple([each for each in found if each is not None])


class _Reduced(torch.autograd.Function):
    """The gradients are made in the forward; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How, wanted: Sequence[bool]
    ) -> Tensor:
        count = _count(how, labels)
        upstream = hidden.new_ones((), dtype=torch.float32) if count is None else count.float().reciprocal()
        value, *gradients = measure_and_differentiate(
            hidden, weight, labels, bias, upstream.expand(len(labels)), *how.terms, wanted
        )
        ctx.how, ctx.wanted = how, wanted
        ctx.save_for_backward(hidden, weight, bias, labels, *gradients)
        return _reduced(how, value.sum(), count)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, *gradients = ctx.saved_tensors
        if differentiated_again() or not transparent(upstream, hidden):
            needs = [*ctx.wanted, False, False]
            return *vjp(_reduced_formula, (hidden, weight, bias, labels, ctx.how), needs, (upstream,)), None
        # New memory each time: the graph may be kept, and what is returned is the caller's.
        found = [scale(gradient, upstream) for gradient in gradients]
        return *_spread(ctx.wanted, found), None, None, None


def _reduced_formula(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How) -> Tensor:
    """What `_Reduced` computes, in operations that can be differentiated again."""
    return reference.compute(how.loss, hidden, weight, labels, bias)


def _spread(wanted: Sequence[bool], found: Sequence[Tensor]) -> list[Tensor | None]:
    rest = iter(found)
    return [next(rest) if need else None for need in wanted]
