"""The values of each token, and sums of them, for autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug_backends.inductor import differentiated_again, plain, recording, vjp
from fuseplug_backends.tracing import is_batch_of_gradients

from ...reference import logits_of
from .chunks import Head, Needs, differentiated, values_of
from .programs import Coefficients, Values

PerToken = tuple[Tensor, Tensor, Tensor]
"""`Values.logprob`, `Values.mean` and `Values.entropy`."""


def per_token(head: Head) -> PerToken:
    """The values of each token. Their backward computes the logits anew."""
    if recording(*head.tensors):
        found: PerToken = _PerToken.apply(*head)  # type: ignore[no-untyped-call]
        return found
    return values_of(head)[1:]


def weighted_sum(head: Head, of_label: Tensor, of_mean: Tensor) -> Tensor:
    """A sum of log-probabilities. Its gradients are made in the forward, where the logits are.

    Args:
        head: The head.
        of_label: What the log-probability of each label is multiplied by, ``(tokens,)``, float32.
        of_mean: What the mean of the log-probabilities of all words is multiplied by, likewise.

    Returns:
        A scalar, float32. What is multiplied by 0 is left out of it, so it may be anything.
    """
    if recording(*head.tensors):
        total: Tensor = _WeightedSum.apply(*head, of_label, of_mean)  # type: ignore[no-untyped-call]
        return total
    return _sum(values_of(head)[1:], of_label, of_mean)


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> PerToken:
        # A result that nobody used has no gradient.
        ctx.set_materialize_grads(False)
        head = Head(*arguments)
        ctx.steps, values = head.steps, values_of(head)
        ctx.save_for_backward(*head.tensors, head.labels, *values)
        return values[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (hidden, weight, bias, labels), values = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        head, needs = Head(hidden, weight, bias, labels, ctx.steps), Needs(*ctx.needs_input_grad[:3])
        given = [grad for grad in grads if grad is not None]
        if not given:
            return _with_labels((None, None, None))
        if _is_for_formula(given):

            def formula(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
                found = _formula(Head(hidden, weight, bias, labels, ctx.steps))
                return [value for value, grad in zip(found, grads, strict=True) if grad is not None]

            return _with_labels(vjp(formula, head.tensors, needs, given))
        coefficients = [torch.zeros_like(values[0]) if grad is None else grad for grad in grads]
        return _with_labels(differentiated(head, Coefficients(*coefficients), needs, Values(*values))[1])


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *of_head, of_label, of_mean = arguments
        head, needs = Head(*of_head), Needs(*ctx.needs_input_grad[:3])
        ctx.steps = head.steps
        ctx.save_for_backward(*head.tensors, head.labels, of_label, of_mean)
        coefficients = Coefficients(of_label, of_mean, torch.zeros_like(of_mean))
        values, ctx.gradients = differentiated(head, coefficients, needs)
        return _sum(values[1:], of_label, of_mean)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        needs = Needs(*ctx.needs_input_grad[:3])
        if _is_for_formula([upstream]):
            hidden, weight, bias, labels, of_label, of_mean = ctx.saved_tensors

            def formula(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return _sum(_formula(Head(hidden, weight, bias, labels, ctx.steps)), of_label, of_mean)

            return *_with_labels(vjp(formula, (hidden, weight, bias), needs, (upstream,))), None, None
        # Handed over at the first backward, so that they are multiplied in place and become somebody's .grad without a
        # copy; a second one, which takes retain_graph, computes them anew.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            hidden, weight, bias, labels, of_label, of_mean = ctx.saved_tensors
            coefficients = Coefficients(of_label * upstream, of_mean * upstream, torch.zeros_like(of_mean))
            _, gradients = differentiated(Head(hidden, weight, bias, labels, ctx.steps), coefficients, needs)
        elif (factor := upstream.item()) != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return *_with_labels(gradients), None, None


def _is_for_formula(grads: Sequence[Tensor]) -> bool:
    """Whether a backward is to be computed by plain PyTorch, with all logits in memory."""
    return differentiated_again() or not plain(*grads) or any(map(is_batch_of_gradients, grads))


def _with_labels(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of hidden, weight and bias, and ``None`` for the other members of a `Head`."""
    return (*gradients, None, None)


def _sum(values: PerToken, of_label: Tensor, of_mean: Tensor) -> Tensor:
    logprob, mean, _ = values
    label_parts, mean_parts = (torch.where(c != 0, v * c, 0.0) for v, c in ((logprob, of_label), (mean, of_mean)))
    return (label_parts + mean_parts).sum()


def _formula(head: Head) -> PerToken:
    """`per_token` in plain PyTorch, for those who want to differentiate it again."""
    logprobs = functional.log_softmax(logits_of(*head.tensors, head.steps).float(), -1)
    label = logprobs.gather(-1, head.labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -math.inf, 0)).sum(-1)
    return label, logprobs.mean(-1), entropy
