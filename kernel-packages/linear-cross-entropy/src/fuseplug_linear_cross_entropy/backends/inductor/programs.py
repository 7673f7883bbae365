"""The compiled programs between the matmuls: statistics of each token's logits, and the gradient in the logits' place.

There are two programs, because a single one would use ``exp`` both in the sum and after it, and write it to memory in
float32. They take any number of rows, any vocabulary and any numbers in the steps, so a model needs no more than these
two. In return, they compute entropy and mean even if nobody wants them, which takes 2.6 of the 140 ms that 512 tokens
of 32,000 words take forward and backward (bfloat16, hidden 512, two x86 cores).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug_backends.inductor import Program

from ...reference import Step

_NO_PROBABILITY = -200.0
"""A log-probability whose exponential is 0 in float32. It replaces -inf, whose product with that 0 would be NaN."""


class Values(NamedTuple):
    """The numbers that the logits of each token give; ``(tokens,)``, float32.

    Attributes:
        logprob: The log-probability of the label.
        mean: The mean of the log-probabilities of all words.
        entropy: As in `reference.STATISTICS`.
        logsumexp: As in `reference.STATISTICS`.
        mean_logits: As in `reference.STATISTICS`.
        log_sum_sq_probs: As in `reference.STATISTICS`.
        is_top1: As in `reference.STATISTICS`, 1 or 0.
    """

    logprob: Tensor
    mean: Tensor
    entropy: Tensor
    logsumexp: Tensor
    mean_logits: Tensor
    log_sum_sq_probs: Tensor
    is_top1: Tensor


class Coefficients(NamedTuple):
    """The derivative of a result with respect to each of the differentiable `Values`; ``(tokens,)``, float32."""

    logprob: Tensor
    mean: Tensor
    entropy: Tensor
    logsumexp: Tensor
    mean_logits: Tensor
    log_sum_sq_probs: Tensor


def factors_of(steps: Sequence[Step]) -> Tensor:
    """The factors of a logit before the first ``tanh`` of *steps*, between each two, and after the last.

    Returns:
        ``(number of tanhs + 1,)``, float32, on the CPU.
    """
    factors = [1.0]
    for kind, number in steps:
        if kind == "tanh":
            factors.append(1.0)
        elif kind == "mul":
            factors[-1] *= number
        elif kind == "div":
            factors[-1] /= number
    return torch.tensor(factors, dtype=torch.float32, device="cpu")


def statistics(z: Tensor, labels: Tensor, factors: Tensor) -> Values:
    """The `Values` of some tokens.

    Args:
        z: ``(rows, vocabulary)``, the output of the linear layer.
        labels: ``(rows,)``, int64, each a column of *z*.
        factors: The result of `factors_of`.
    """
    return Values(*_run(_statistics, z, (labels.unsqueeze(1),), factors))


def into_gradient(z: Tensor, labels: Tensor, values: Values, coefficients: Coefficients, factors: Tensor) -> None:
    """Overwrite *z* with its gradient, computed in float32 and rounded once.

    Args:
        z: As for `statistics`.
        labels: As for `statistics`.
        values: The result of `statistics` for *z*.
        coefficients: The derivatives of the result.
        factors: As for `statistics`.
    """
    of_label, of_mean, of_entropy, of_lse, of_mean_logits, of_squares = coefficients
    # With p the probability of word j, the derivatives with respect to its logit are [j is the label] - p for logprob,
    # 1 / words - p for mean, -p (log p + entropy) for entropy, p for logsumexp, 1 / words for mean_logits, and
    # 2 p² / Σ p² - 2 p for log Σ p².
    of_p = of_label + of_mean + of_entropy * values.entropy - of_lse + 2 * of_squares
    even = (of_mean + of_mean_logits) / z.shape[1]
    of_square = 2 * of_squares * torch.exp(-values.log_sum_sq_probs)
    by_row = torch.stack((values.logsumexp, of_label, even, of_p, of_entropy, of_square), 1)
    _run(_into_gradient, z, (labels.unsqueeze(1), by_row), factors)


def _after_steps(z: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """The logits after the steps, and their derivative with respect to *z*."""
    first, *others = factors.unbind()
    y, slope = z.float() * first, first.expand_as(z)
    for factor in others:
        y = torch.tanh(y)
        slope = slope * (1 - y * y) * factor
        y = y * factor
    return y, slope


def _statistics(z: Tensor, labels: Tensor, factors: Tensor) -> tuple[Tensor, ...]:
    y, _ = _after_steps(z, factors)
    words, word = z.shape[1], torch.arange(z.shape[1], dtype=torch.int32, device=z.device)
    column = labels.to(torch.int32)
    # Not gathered, because the tanh of a single number may differ from its tanh among several.
    label = torch.where(word == column, y, 0.0).sum(1, keepdim=True)
    top = y.amax(1, keepdim=True)
    below = y - top
    exp = torch.exp(below)
    total = exp.sum(1)
    log_total, above = total.log(), torch.where((word < column) & (y >= label), 1.0, 0.0).sum(1)
    return (
        (label - top).squeeze(1) - log_total,
        below.sum(1) / words - log_total,
        log_total - (exp * below.clamp(min=_NO_PROBABILITY)).sum(1) / total,
        top.squeeze(1) + log_total,
        y.sum(1) / words,
        (exp * exp).sum(1).log() - 2 * log_total,
        torch.where((label == top).squeeze(1) & (above == 0), 1.0, 0.0),
    )


def _into_gradient(z: Tensor, labels: Tensor, by_row: Tensor, factors: Tensor) -> tuple[()]:
    lse, of_label, even, of_p, of_entropy, of_square = by_row.split(1, 1)  # type: ignore[no-untyped-call]
    y, slope = _after_steps(z, factors)
    logprob = (y - lse).clamp(min=_NO_PROBABILITY)
    p = torch.exp(logprob)
    is_label = torch.arange(z.shape[1], dtype=torch.int32, device=z.device) == labels.to(torch.int32)
    gradient = torch.where(is_label, of_label, 0.0) + even - p * (of_p + of_entropy * logprob - of_square * p)
    z.copy_((gradient * slope).to(z.dtype))
    return ()


_programs: dict[Hashable, Program] = {}


def _run(function: Callable[..., Any], z: Tensor, by_row: Sequence[Tensor], factors: Tensor) -> Any:
    """Call *function* as a compiled program, one for each number of tanhs and dtype."""
    key = (function, len(factors), z.dtype, z.device)
    program = _programs.get(key)
    if program is None:
        program = _programs.setdefault(key, Program(function, [(0, 1), *((0,) for _ in by_row), ()]))
    return program(z, *by_row, factors)
