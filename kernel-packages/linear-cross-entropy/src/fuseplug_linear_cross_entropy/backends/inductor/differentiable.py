"""The values of each token, and sums of them, with gradients for autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug_backends.inductor import differentiated_again, plain, recording, vjp

from ...reference import STATISTICS, logits_of
from .chunks import Head, Needs, differentiated, values_of
from .programs import Coefficients, Values


def per_token(head: Head) -> Values:
    """The values of each token. Their backward computes the logits again."""
    return Values(*_PerToken.apply(*head)) if recording(*head.tensors) else values_of(head)  # type: ignore[no-untyped-call]


def weighted_sum(head: Head, of_label: Tensor, of_mean: Tensor) -> Tensor:
    """A weighted sum of log-probabilities. The forward makes its gradients, because it has the logits.

    Args:
        head: The head.
        of_label: The factor of each label's log-probability, ``(tokens,)``, float32.
        of_mean: The factor of the mean log-probability of all words, likewise.

    Returns:
        A scalar, float32. Numbers with the factor 0 are left out of it, so they may be anything.
    """
    if recording(*head.tensors):
        total: Tensor = _WeightedSum.apply(*head, of_label, of_mean)  # type: ignore[no-untyped-call]
        return total
    return _sum(values_of(head), of_label, of_mean)


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        # The gradient of a result that nobody used is None.
        ctx.set_materialize_grads(False)
        head = Head(*arguments)
        ctx.steps, values = head.steps, values_of(head)
        ctx.save_for_backward(*head.tensors, head.labels, *values)
        ctx.mark_non_differentiable(values.is_top1)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, *values = ctx.saved_tensors  # read only once: a checkpoint computes them for it
        head, needs = Head(hidden, weight, bias, labels, ctx.steps), Needs(*ctx.needs_input_grad[:3])
        given = [grad for grad in grads if grad is not None]
        if not given:
            return _with_labels((None, None, None))
        if _is_for_formula(given):

            def formula(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
                results = _formula(Head(hidden, weight, bias, labels, ctx.steps))
                return [value for value, grad in zip(results, grads, strict=True) if grad is not None]

            return _with_labels(vjp(formula, head.tensors, needs, given))
        coefficients = dict(zip(Values._fields, grads, strict=True))
        return _with_labels(differentiated(head, _coefficients(**coefficients), needs, Values(*values))[1])


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *of_head, of_label, of_mean = arguments
        head, needs = Head(*of_head), Needs(*ctx.needs_input_grad[:3])
        ctx.steps = head.steps
        ctx.save_for_backward(*head.tensors, head.labels, of_label, of_mean)
        values, ctx.gradients = differentiated(head, _coefficients(logprob=of_label, mean=of_mean), needs)
        return _sum(values, of_label, of_mean)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        needs = Needs(*ctx.needs_input_grad[:3])
        if _is_for_formula([upstream]):
            hidden, weight, bias, labels, of_label, of_mean = ctx.saved_tensors

            def formula(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return _sum(_formula(Head(hidden, weight, bias, labels, ctx.steps)), of_label, of_mean)

            return *_with_labels(vjp(formula, (hidden, weight, bias), needs, (upstream,))), None, None
        # The first backward hands the gradients over, so that they are multiplied in place and become somebody's .grad
        # without a copy. A second backward, which needs retain_graph, computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            hidden, weight, bias, labels, of_label, of_mean = ctx.saved_tensors
            coefficients = _coefficients(logprob=of_label * upstream, mean=of_mean * upstream)
            _, gradients = differentiated(Head(hidden, weight, bias, labels, ctx.steps), coefficients, needs)
        elif (factor := upstream.item()) != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return *_with_labels(gradients), None, None


def _is_for_formula(grads: Sequence[Tensor]) -> bool:
    """Whether plain PyTorch must compute a backward, with all logits in memory."""
    return differentiated_again() or not plain(*grads)


def _with_labels(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of hidden, weight and bias, and ``None`` for the other members of a `Head`."""
    return (*gradients, None, None)


def _coefficients(**by_name: Tensor | None) -> Coefficients:
    """The coefficients that are given by the name of their value, and 0 for the others."""
    zeros = torch.zeros_like(next(value for value in by_name.values() if value is not None))
    return Coefficients(*(zeros if (value := by_name.get(name)) is None else value for name in Coefficients._fields))


def _sum(values: Values, of_label: Tensor, of_mean: Tensor) -> Tensor:
    terms = ((values.logprob, of_label), (values.mean, of_mean))
    label_parts, mean_parts = (torch.where(c != 0, v * c, 0.0) for v, c in terms)
    return (label_parts + mean_parts).sum()


def _formula(head: Head) -> Values:
    """`per_token` in plain PyTorch, which can be differentiated again."""
    y = logits_of(*head.tensors, head.steps).float()
    logprobs = functional.log_softmax(y, -1)
    label = logprobs.gather(-1, head.labels.unsqueeze(-1)).squeeze(-1)
    by_name = {name: formula(y, logprobs, head.labels) for name, formula in STATISTICS.items()}
    return Values(label, logprobs.mean(-1), **by_name)
