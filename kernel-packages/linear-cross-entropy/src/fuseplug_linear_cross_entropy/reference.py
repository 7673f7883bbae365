"""The linear cross-entropy in plain PyTorch: the logits of a head, a few steps on them, and their loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["linear_cross_entropy", "linear_logprob"]

Reduction: TypeAlias = Literal["mean", "sum", "none"]


class Step(NamedTuple):
    """Something that a model does to each logit before the loss.

    Attributes:
        kind: A key of `STEPS`.
        number: The factor of ``"mul"`` or the divisor of ``"div"``; other kinds ignore it.
    """

    kind: str
    number: float = 1.0


STEPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "float": lambda y, _: y.to(torch.promote_types(y.dtype, torch.float32)),
    "mul": lambda y, number: y * number,
    "div": lambda y, number: y / number,
    "tanh": lambda y, _: torch.tanh(y),
}
"""The function of each kind of step. It computes in the dtype that the previous step leaves."""

FLOAT = Step("float")


def scaled(number: float) -> tuple[Step, ...]:
    """The steps of a model that multiplies its logits, as Cohere's do: ``logits * number``, then float32."""
    return Step("mul", float(number)), FLOAT


def softcapped(cap: float) -> tuple[Step, ...]:
    """The steps of a model with capped logits (Gemma 2): ``cap * tanh(logits / cap)``, then float32."""
    return Step("div", float(cap)), Step("tanh"), Step("mul", float(cap)), FLOAT


STATISTICS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "entropy": lambda _, logp, __: -(logp.exp() * logp.masked_fill(logp == -math.inf, 0)).sum(-1),
    "logsumexp": lambda y, *_: y.logsumexp(-1),
    "mean_logits": lambda y, *_: y.mean(-1),
    "log_sum_sq_probs": lambda _, logp, __: (2 * logp).logsumexp(-1),
    "is_top1": lambda y, _, labels: y.argmax(-1) == labels,
}
"""Statistics of each token's distribution, from the logits after the steps ``(tokens, vocabulary)``, their
``log_softmax``, and the labels ``(tokens,)``. Results are ``(tokens,)``; only ``is_top1``, which is bool, has no
gradient. All names but ``logsumexp`` are TRL's, in ``FusedCausalLMOutput``.
"""


class Loss(NamedTuple):
    """The checked arguments of `linear_cross_entropy`, without the tensors."""

    steps: tuple[Step, ...]
    ignore_index: int
    reduction: Reduction
    label_smoothing: float | None
    statistics: tuple[str, ...] = ()


class LossAndStatistics(NamedTuple):
    """The result of `linear_cross_entropy` with *statistics*; a statistic that was not asked for is ``None``.

    Below, p are the probabilities of a token, and y its logits after the steps. Statistics have the shape of the
    labels, and are 0 where a label is ignored.

    Attributes:
        loss: The cross-entropy, as without statistics.
        entropy: ``-Σ p log p``.
        logsumexp: ``log Σ exp y``.
        mean_logits: ``mean y``.
        log_sum_sq_probs: ``log Σ p²``.
        is_top1: Whether the label is the first of the largest logits, bool.
    """

    loss: Tensor
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    is_top1: Tensor | None = None


class LogProbs(NamedTuple):
    """The result of `linear_logprob`.

    Attributes:
        logprob: The log-probability of each label, of the labels' shape; 0 where a label is ignored.
        entropy: The entropy of each token's distribution, likewise; ``None`` if it was not asked for.
    """

    logprob: Tensor
    entropy: Tensor | None


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, steps: Sequence[Step]) -> Tensor:
    """The logits, ``(..., vocabulary)``, after *steps*."""
    y = functional.linear(hidden, weight, bias)
    for step in steps:
        y = STEPS[step.kind](y, step.number)
    return y


Tokens: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""The log-probability of each label, and the statistics by name; each ``(tokens,)``, 0 where a label is ignored."""


def compute(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor | Tokens:
    """`linear_cross_entropy` for checked arguments: `compute_tokens` with statistics, else `compute_loss`."""
    return (compute_tokens if loss.statistics else compute_loss)(loss, hidden, weight, labels, bias)


def compute_loss(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
    """`linear_cross_entropy` without statistics, for checked arguments.

    Args:
        loss: The numbers and the steps.
        hidden: ``(tokens, hidden)``, floating.
        weight: ``(vocabulary, hidden)``, of the dtype of *hidden*.
        labels: ``(tokens,)``, int64.
        bias: ``(vocabulary,)``, of the dtype of *hidden*, or ``None``.

    Returns:
        The loss, in the dtype that the last step leaves: a scalar; ``(tokens,)`` without a reduction; ``(2, tokens)``
        if the label smoothing is ``None``.
    """
    logits = logits_of(hidden, weight, bias, loss.steps)
    if loss.label_smoothing is not None:
        return functional.cross_entropy(
            logits,
            labels,
            ignore_index=loss.ignore_index,
            reduction=loss.reduction,
            label_smoothing=loss.label_smoothing,
        )
    logprobs = functional.log_softmax(logits, -1)
    of_label = functional.nll_loss(logprobs, labels, ignore_index=loss.ignore_index, reduction="none")
    return torch.stack((of_label, -logprobs.mean(-1).masked_fill(labels == loss.ignore_index, 0)))


def compute_tokens(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tokens:
    """The log-probabilities and the statistics that *loss* names, for the arguments of `compute`."""
    y = logits_of(hidden, weight, bias, loss.steps)
    logprobs = functional.log_softmax(y, -1)
    # On the CPU, `gather` would raise another error for a label outside of the vocabulary.
    losses = functional.nll_loss(logprobs, labels, ignore_index=loss.ignore_index, reduction="none")
    ignored = labels == loss.ignore_index
    values = {name: STATISTICS[name](y, logprobs, labels).masked_fill(ignored, 0) for name in loss.statistics}
    return (-losses).masked_fill(ignored, 0), values


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    steps: Sequence[Step] = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float | None = ...,
    compute: Callable[[Loss, Tensor, Tensor, Tensor, Tensor | None], Tensor | Tokens] = ...,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    steps: Sequence[Step] = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float | None = ...,
    compute: Callable[[Loss, Tensor, Tensor, Tensor, Tensor | None], Tensor | Tokens] = ...,
    statistics: Sequence[str],
) -> LossAndStatistics: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    steps: Sequence[Step] = (FLOAT,),
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float | None = 0.0,
    compute: Callable[[Loss, Tensor, Tensor, Tensor, Tensor | None], Tensor | Tokens] = compute,
    statistics: Sequence[str] = (),
) -> Tensor | LossAndStatistics:
    """Cross-entropy of the logits of a linear layer: ``cross_entropy(steps(hidden @ weight.T + bias), labels)``.

    Args:
        hidden: ``(..., hidden)``, floating. Labels are not shifted: a model that predicts the next token passes
            ``hidden[..., :-1, :]`` and ``labels[..., 1:]``.
        weight: ``(vocabulary, hidden)``, of the dtype of *hidden*.
        labels: ``(...)``, int64.
        bias: ``(vocabulary,)`` or ``None``, of the dtype of *hidden*.
        steps: The steps to apply to the logits before the loss. By default, one step widens them to float32; `scaled`
            and `softcapped` make other steps.
        ignore_index: The label of tokens that do not count.
        reduction: ``"mean"`` over the tokens that count (NaN if none does), ``"sum"``, or ``"none"``.
        label_smoothing: The share of the target to spread over the whole vocabulary, from 0 to 1. ``None``, which needs
            the reduction ``"none"``, gives the losses for 0 and for 1, for the caller to mix.
        compute: A backend's function, called with the `Loss` and the checked tensors.
        statistics: Keys of `STATISTICS` to compute for each token, in the same pass over the vocabulary. They need the
            *label_smoothing* 0.

    Returns:
        The loss, differentiable with respect to *hidden*, *weight* and *bias*: a scalar; ``(...)`` for ``"none"``;
        ``(2, ...)`` if *label_smoothing* is ``None``. It is float32, or has the logits' dtype if *steps* do not widen
        them. Autocast affects it as it affects ``F.linear`` and ``F.cross_entropy``. With *statistics*, a
        `LossAndStatistics`, differentiable except for ``is_top1``.

    Raises:
        ValueError: If a shape, dtype, step, reduction, statistic or number does not fit.
        IndexError: On a CPU, if a label is neither *ignore_index* nor a row of *weight*. Elsewhere the device reports
            it, as for ``F.cross_entropy``.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")
    if label_smoothing is None and reduction != "none":
        raise ValueError(f"label_smoothing=None needs reduction='none'; reduction is {reduction!r}")
    if not (label_smoothing is None or 0.0 <= label_smoothing <= 1.0):
        raise ValueError(f"label_smoothing is {label_smoothing!r}; expected a number from 0 to 1")
    if unknown := [name for name in statistics if name not in STATISTICS]:
        raise ValueError(f"unknown statistic {unknown[0]!r}; known: {', '.join(STATISTICS)}")
    if statistics and label_smoothing != 0.0:
        raise ValueError(f"statistics need label_smoothing=0.0; label_smoothing is {label_smoothing!r}")
    smoothing = None if label_smoothing is None else float(label_smoothing)
    names = tuple(name for name in STATISTICS if name in statistics)
    loss = Loss(tuple(Step(*step) for step in steps), ignore_index, reduction, smoothing, names)
    loss, hidden, weight, bias, alone = _as_called(loss, hidden, weight, labels, bias)
    with alone:
        result = compute(loss, hidden.reshape(labels.numel(), hidden.shape[-1]), weight, labels.reshape(-1), bias)
    if not isinstance(result, Tensor):
        logprob, values = result
        by_name = {name: value.reshape(labels.shape) for name, value in values.items()}
        return LossAndStatistics(_reduced(loss, -logprob.reshape(labels.shape), labels), **by_name)
    if names:
        raise TypeError(f"{compute.__module__} computes a loss without statistics; call it without statistics={names}")
    if reduction != "none":
        return result
    return result.reshape(labels.shape if smoothing is not None else (2, *labels.shape))


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    steps: Sequence[Step] = (FLOAT,),
    ignore_index: int = -100,
    entropy: bool = False,
    compute: Callable[[Loss, Tensor, Tensor, Tensor, Tensor | None], Tokens] = compute_tokens,
) -> LogProbs:
    """The log-probability of each label, and the entropy of each token, for reinforcement learning.

    Args:
        hidden: As for `linear_cross_entropy`.
        weight: As for `linear_cross_entropy`.
        labels: As for `linear_cross_entropy`: the tokens that were sampled.
        bias: As for `linear_cross_entropy`.
        steps: As for `linear_cross_entropy`. A sampling temperature is a step ``Step("div", temperature)`` before the
            last.
        ignore_index: The label of tokens whose results are 0 and have no gradient.
        entropy: Whether to compute the entropy, in nats.
        compute: As for `linear_cross_entropy`.

    Returns:
        `LogProbs`, both differentiable with respect to *hidden*, *weight* and *bias*, in the dtype of the result of
        `linear_cross_entropy`.

    Raises:
        ValueError, IndexError: As for `linear_cross_entropy`.
    """
    names = ("entropy",) if entropy else ()
    loss = Loss(tuple(Step(*step) for step in steps), ignore_index, "none", 0.0, statistics=names)
    loss, hidden, weight, bias, alone = _as_called(loss, hidden, weight, labels, bias)
    with alone:
        flat = hidden.reshape(labels.numel(), hidden.shape[-1])
        logprob, values = compute(loss, flat, weight, labels.reshape(-1), bias)
    return LogProbs(logprob.reshape(labels.shape), values["entropy"].reshape(labels.shape) if entropy else None)


def _reduced(loss: Loss, losses: Tensor, labels: Tensor) -> Tensor:
    """The tokens' losses after the reduction, which adds in float32 at least."""
    if loss.reduction == "none":
        return losses
    total = losses.to(torch.promote_types(losses.dtype, torch.float32)).sum()
    return (total / (labels != loss.ignore_index).sum() if loss.reduction == "mean" else total).to(losses.dtype)


def _as_called(
    loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
) -> tuple[Loss, Tensor, Tensor, Tensor | None, contextlib.AbstractContextManager[object]]:
    """The arguments as autocast changes them, and a context without autocast for the computation."""
    kind = hidden.device.type
    alone: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)  # which autocast does not give to float64
        hidden, weight = (t if t.dtype is torch.float64 else t.to(dtype) for t in (hidden, weight))
        bias = bias if bias is None or bias.dtype is torch.float64 else bias.to(dtype)
        # F.cross_entropy is computed in float32 under autocast.
        loss = loss._replace(steps=(*loss.steps, FLOAT))
        alone = torch.autocast(kind, enabled=False)
    _check(loss, hidden, weight, labels, bias)
    return loss, hidden, weight, bias, alone


def _check(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    for step in loss.steps:
        if step.kind not in STEPS:
            raise ValueError(f"unknown step {step.kind!r}; known: {', '.join(STEPS)}")
        if not math.isfinite(step.number) or (step.kind == "div" and step.number == 0):
            raise ValueError(f"step {step.kind!r} has the number {step.number}; expected a finite one, 0 only for mul")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}; expected (..., hidden) and "
            "(vocabulary, hidden)"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels are {list(labels.shape)}; expected one for each row of hidden {list(hidden.shape)}")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels are {labels.dtype}; expected torch.int64: labels.long()")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}; expected {list(weight.shape[:1])}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise ValueError(f"{name} is {tensor.dtype}; expected {hidden.dtype}, the dtype of hidden")
