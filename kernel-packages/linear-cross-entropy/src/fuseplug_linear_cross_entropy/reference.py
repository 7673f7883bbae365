"""What a linear cross-entropy computes, in plain PyTorch: the logits of a head, a few steps on them, and their loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["linear_cross_entropy", "linear_logprob"]

Reduction: TypeAlias = Literal["mean", "sum", "none"]


class Step(NamedTuple):
    """Something that a model does to each logit before the loss.

    Attributes:
        kind: A key of `STEPS`.
        number: By what it multiplies or divides; of no meaning for other kinds.
    """

    kind: str
    number: float = 1.0


STEPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "float": lambda y, _: y.to(torch.promote_types(y.dtype, torch.float32)),
    "mul": lambda y, number: y * number,
    "div": lambda y, number: y / number,
    "tanh": lambda y, _: torch.tanh(y),
}
"""What each kind of step computes, in the dtype that the step before leaves."""

FLOAT = Step("float")


def scaled(number: float) -> tuple[Step, ...]:
    """The steps of a model that multiplies its logits, as Cohere's do: ``logits * number``, then float32."""
    return Step("mul", float(number)), FLOAT


def softcapped(cap: float) -> tuple[Step, ...]:
    """The steps of a model with capped logits (Gemma 2): ``cap * tanh(logits / cap)``, then float32."""
    return Step("div", float(cap)), Step("tanh"), Step("mul", float(cap)), FLOAT


class Loss(NamedTuple):
    """The arguments of `linear_cross_entropy` that are no tensors, checked."""

    steps: tuple[Step, ...]
    ignore_index: int
    reduction: Reduction
    label_smoothing: float | None


class LogProbs(NamedTuple):
    """What `linear_logprob` returns.

    Attributes:
        logprob: The log-probability of each label, float32, of the labels' shape; 0 where a label is ignored.
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


def compute(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
    """`linear_cross_entropy` for arguments that were checked.

    Args:
        loss: The numbers and the steps.
        hidden: ``(tokens, hidden)``, floating.
        weight: ``(vocabulary, hidden)``, of the dtype of *hidden*.
        labels: ``(tokens,)``, int64.
        bias: ``(vocabulary,)`` or ``None``, likewise.

    Returns:
        The loss: a scalar, or ``(tokens,)`` without a reduction, or ``(2, tokens)`` without a label smoothing, in the
        dtype that the last step leaves.
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


def compute_logprob(
    loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *, entropy: bool
) -> LogProbs:
    """`linear_logprob` for arguments that were checked, as those of `compute`. Both results are ``(tokens,)``."""
    logprobs = functional.log_softmax(logits_of(hidden, weight, bias, loss.steps), -1)
    # Not `gather`, whose error for a label that is no word is another one on the CPU.
    losses = functional.nll_loss(logprobs, labels, ignore_index=loss.ignore_index, reduction="none")
    ignored = labels == loss.ignore_index
    entropies = -(logprobs.exp() * logprobs.masked_fill(logprobs == -math.inf, 0)).sum(-1) if entropy else None
    return LogProbs((-losses).masked_fill(ignored, 0), None if entropies is None else entropies.masked_fill(ignored, 0))


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
    compute: Callable[[Loss, Tensor, Tensor, Tensor, Tensor | None], Tensor] = compute,
) -> Tensor:
    """Cross-entropy of the logits of a linear layer: ``cross_entropy(steps(hidden @ weight.T + bias), labels)``.

    Args:
        hidden: ``(..., hidden)``, floating. The labels belong to it as it is: a model that predicts the next token
            passes ``hidden[..., :-1, :]`` and ``labels[..., 1:]``.
        weight: ``(vocabulary, hidden)``, of the dtype of *hidden*.
        labels: ``(...)``, int64.
        bias: ``(vocabulary,)`` or ``None``, of the dtype of *hidden*.
        steps: What is done to the logits first: by default they are widened to float32. `scaled` and `softcapped` make
            others.
        ignore_index: The label of tokens that do not count.
        reduction: ``"mean"`` over the tokens that count (NaN if none does), ``"sum"``, or ``"none"``.
        label_smoothing: How much of the target is spread over the whole vocabulary, from 0 to 1. ``None``, with the
            reduction ``"none"``, gives the losses for 0 and for 1, to be mixed by the caller.
        compute: What is given the tensors once they are checked, and the `Loss`: that of a backend.

    Returns:
        The loss, differentiable in *hidden*, *weight* and *bias*: a scalar; ``(...)`` for ``"none"``; ``(2, ...)`` for
        no *label_smoothing*; float32, or the logits' dtype if *steps* do not widen them. Under autocast as ``F.linear``
        and ``F.cross_entropy``.

    Raises:
        ValueError: If a shape, dtype, step, reduction or number does not fit.
        IndexError: On a CPU, if a label is neither *ignore_index* nor a row of *weight*. Elsewhere the device says so,
            as for ``F.cross_entropy``.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")
    if label_smoothing is None and reduction != "none":
        raise ValueError(f"reduction is {reduction!r}; expected 'none', where label_smoothing is None")
    if not (label_smoothing is None or 0.0 <= label_smoothing <= 1.0):
        raise ValueError(f"label_smoothing is {label_smoothing!r}; expected a number from 0 to 1")
    smoothing = None if label_smoothing is None else float(label_smoothing)
    loss = Loss(tuple(Step(*step) for step in steps), ignore_index, reduction, label_smoothing=smoothing)
    loss, hidden, weight, bias, alone = _as_called(loss, hidden, weight, labels, bias)
    with alone:
        result = compute(loss, hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), bias)
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
    compute: Callable[..., LogProbs] = compute_logprob,
) -> LogProbs:
    """The log-probability of each label, and the entropy of each token, for reinforcement learning.

    Args:
        hidden: As for `linear_cross_entropy`.
        weight: As there.
        labels: As there: the tokens that were sampled.
        bias: As there.
        steps: As there. A sampling temperature is a step ``Step("div", temperature)`` before the last.
        ignore_index: The label of tokens whose results are 0 and without a gradient.
        entropy: Whether to compute the entropy, in nats.
        compute: As there.

    Returns:
        `LogProbs`, both differentiable in *hidden*, *weight* and *bias*; in the dtype of `linear_cross_entropy`.

    Raises:
        ValueError, IndexError: As `linear_cross_entropy`.
    """
    loss = Loss(tuple(Step(*step) for step in steps), ignore_index, reduction="none", label_smoothing=0.0)
    loss, hidden, weight, bias, alone = _as_called(loss, hidden, weight, labels, bias)
    with alone:
        flat = hidden.reshape(-1, hidden.shape[-1])
        of_rows = compute(loss, flat, weight, labels.reshape(-1), bias, entropy=entropy)
    entropies = None if of_rows.entropy is None else of_rows.entropy.reshape(labels.shape)
    return LogProbs(of_rows.logprob.reshape(labels.shape), entropies)


def _as_called(
    loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
) -> tuple[Loss, Tensor, Tensor, Tensor | None, contextlib.AbstractContextManager[object]]:
    """The arguments as autocast changes them, and a context without autocast to compute in."""
    kind = hidden.device.type
    alone: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
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
