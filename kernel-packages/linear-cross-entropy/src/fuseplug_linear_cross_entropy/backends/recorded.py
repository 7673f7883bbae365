"""Losses and log-probabilities, with their gradients, from the operations of a backend.

The gradients of a mean or a sum are made in the forward, where each logit is computed once. The backward scales them.
What was added up in float32 is kept so until then, and rounded once. A backend may have the logits kept instead.
Without a reduction, and for log-probabilities, the gradient of each token is known in the backward only, which computes
the logits anew. So it is for float16: there the gradient of a mean is too small for its dtype unless the loss is
scaled, and by how much is in the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.triton import differentiable, recording

from .. import reference
from ..reference import STATISTICS, Loss, Tokens
from .folded import folded

BESIDES = ("mean", *STATISTICS)
"""What there may be of each token besides its value: the mean of the log-probabilities of all words, and statistics."""


class Terms(NamedTuple):
    """What is computed of the logits of a token, after *inner*, *outer* and *capped* (see `folded`).

    With p the probabilities and l the label, the value is ``picked · log p_l + spread · mean(log p)``: a loss, smoothed
    or not, or a log-probability. It is 0 for the label *ignore_index*, and NaN for one outside of the vocabulary.
    """

    ignore_index: int
    picked: float
    spread: float
    inner: float
    outer: float
    capped: bool


class Operations(NamedTuple):
    """What a backend computes.

    Arguments are positional: first hidden, weight, labels and bias, as for `reference.compute`; they are not empty, of
    one dtype of float16, bfloat16 and float32, each matrix in adjacent rows or columns, labels contiguous. Then:

    Attributes:
        measure: Takes the `Terms`, one by one, whether each of `BESIDES` is asked for, and whether the logits are.
            Gives the value of each token, and in their order those of `BESIDES` that are asked for; what
            `differentiate` is to be given again, all in float32; and the logits if asked for.
        differentiate: Takes the gradient of the value; the gradient of the entropy, and the entropy, or ``None`` twice;
            the gradient of the mean or ``None``; by what each probability p, and each p², is multiplied besides, or
            ``None`` twice; what `measure` wanted kept, or ``None``; the logits, or ``None``; the terms; and which of
            the gradients of hidden, weight and bias are wanted. Gives these; those that are sums may be in float32.
        measure_and_differentiate: Takes the gradient of the value, the terms, and which gradients are wanted. Gives the
            value and these; those that are sums may be in float32.
        scale: Takes a tensor, a number of no dimension and on its device, and a dtype. Gives their product in that
            dtype, rounded once.
        serves: Whether the operations can be put between tensors and their gradients, here and now.
        keeps: Takes hidden and weight. Says whether the logits of a mean or a sum are kept for the backward, rather
            than gradients that it scales.
    """

    measure: Callable[..., list[Tensor]]
    differentiate: Callable[..., list[Tensor]]
    measure_and_differentiate: Callable[..., list[Tensor]]
    scale: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    serves: Callable[..., bool]
    keeps: Callable[[Tensor, Tensor], bool]


def compute(
    operations: Operations, loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
) -> Tensor | Tokens:
    """`reference.compute` by *operations*, or itself where they do not serve."""
    if loss.statistics:
        return compute_tokens(operations, loss, hidden, weight, labels, bias)
    form = _form(operations, loss, hidden, is_logprob=False)
    if form is None or not _serves(operations, hidden, weight, labels, bias):
        return by_reference(reference.compute_loss, loss, hidden, weight, labels, bias)
    hidden, weight, labels = _matrix(hidden), _matrix(weight), labels.contiguous()
    if form.mean:
        losses, means = _measured(form, hidden, weight, labels, bias)
        return torch.stack((losses, -means))
    if loss.reduction == "none":
        return _measured(form, hidden, weight, labels, bias)[0]
    is_recorded = recording(hidden, weight, bias)
    keep = is_recorded and operations.keeps(hidden, weight)
    if is_recorded and not keep and hidden.dtype is not torch.float16:
        reduced = differentiable(_reduced_forward, _reduced_backward, _reduced_formula, operations.serves)
        result: Tensor = reduced(form, hidden, weight, bias, labels)
        return result
    wide = form._replace(dtype=torch.float32, keep=keep)
    total = _measured(wide, hidden, weight, labels, bias)[0].sum()
    return _reduced(form, total, _count(form, labels))


def compute_tokens(
    operations: Operations, loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
) -> Tokens:
    """`reference.compute_tokens` by *operations*, or itself where they do not serve."""
    form = _form(operations, loss, hidden, is_logprob=True)
    if form is None or not _serves(operations, hidden, weight, labels, bias):
        return by_reference(reference.compute_tokens, loss, hidden, weight, labels, bias)
    logprob, *values = _measured(form, _matrix(hidden), _matrix(weight), labels.contiguous(), bias)
    by_name = dict(zip(form.besides, values, strict=True))
    return logprob, {name: value != 0 if name == "is_top1" else value for name, value in by_name.items()}


class _Form(NamedTuple):
    """What is not a tensor.

    Attributes:
        operations: What computes it.
        loss: As the reference has it.
        terms: As the operations have it.
        dtype: Of the result.
        is_logprob: Whether the value is a log-probability, and not a loss.
        keep: Whether the logits are kept for the backward.
    """

    operations: Operations
    loss: Loss
    terms: Terms
    dtype: torch.dtype
    is_logprob: bool
    keep: bool = False

    @property
    def mean(self) -> bool:
        """Whether there is the mean of all log-probabilities too."""
        return self.loss.label_smoothing is None

    @property
    def besides(self) -> tuple[str, ...]:
        """What there is besides the value, of `BESIDES`, in that order."""
        return ("mean",) if self.mean else self.loss.statistics


def _form(operations: Operations, loss: Loss, hidden: Tensor, *, is_logprob: bool) -> _Form | None:
    """``None`` for steps that cannot be folded."""
    steps = folded(loss.steps)
    if steps is None:
        return None
    smoothing = loss.label_smoothing or 0.0
    of_label, of_all = (1.0, 0.0) if is_logprob else (smoothing - 1.0, -smoothing)
    wide = reference.FLOAT.kind in [step.kind for step in loss.steps]
    dtype = torch.float32 if wide else hidden.dtype
    return _Form(operations, loss, Terms(loss.ignore_index, of_label, of_all, *steps), dtype, is_logprob)


def _serves(operations: Operations, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> bool:
    return (
        have_model_dtypes(hidden)
        and hidden.numel() > 0
        and weight.numel() > 0
        and operations.serves(hidden, weight, labels, bias)
    )


def _matrix(tensor: Tensor) -> Tensor:
    """*tensor* as a matmul takes it; otherwise each would copy it."""
    return tensor if 1 in tensor.stride() else tensor.contiguous()


def _count(form: _Form, labels: Tensor) -> Tensor | None:
    """What the sum over tokens is divided by."""
    return (labels != form.loss.ignore_index).sum() if form.loss.reduction == "mean" else None


def _reduced(form: _Form, total: Tensor, count: Tensor | None) -> Tensor:
    return _rounded(total if count is None else total / count, form.dtype)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """*tensor* in *dtype*, and itself if it is that already.

    A conversion that changes nothing is one more name for the same tensor. torch 2.11 compiles a function that returns
    one of both without its gradient.
    """
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _measured(form: _Form, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The loss of each token, or its log-probability, and what there is besides."""
    measured = differentiable(_measure, _differentiate, _formula, form.operations.serves)
    results: tuple[Tensor, ...] = measured(form, hidden, weight, bias, labels)
    return results


def _measure(
    form: _Form, _: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
    asked = [name in form.besides for name in BESIDES]
    results = form.operations.measure(hidden, weight, labels, bias, *form.terms, asked, form.keep)
    return tuple([_rounded(result, form.dtype) for result in results[: 1 + len(form.besides)]]), results[1:]


def _differentiate(form: _Form, needs: Sequence[bool], *tensors: Any) -> list[Tensor]:
    """The logits are computed anew, unless they were kept."""
    *rest, hidden, weight, bias, labels = tensors
    number = 1 + len(form.besides)
    upstream, kept = list(rest[:number]), list(rest[number:])  # to torch 2.11's compiler, rest is a tuple
    logits = kept.pop() if form.keep else None
    of_value, *of_others = [gradient.float() for gradient in upstream]
    of, values = dict(zip(form.besides, of_others, strict=True)), dict(zip(form.besides, kept, strict=False))
    lse = kept[-1] if len(kept) > len(form.besides) else None
    known = (of_value, of.get("entropy"), values.get("entropy"), *_of_others(of, values), lse, logits)
    gradients = form.operations.differentiate(hidden, weight, labels, bias, *known, *form.terms, needs[:3])
    return [_rounded(gradient, hidden.dtype) for gradient in gradients]


def _of_others(of: dict[str, Tensor], values: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of the mean, and by what each p and each p² is multiplied besides, for gradients by name.

    By the logit of a word, the derivative of logsumexp is p, that of mean_logits is (1/V − p) + p, of which the first
    is that of the mean, and that of log Σ p² is 2 · p² / Σ p² − 2 · p.
    """
    of_lse, of_mean_logits, of_squares = map(of.get, ("logsumexp", "mean_logits", "log_sum_sq_probs"))
    terms = [gradient for gradient in (of_lse, of_mean_logits) if gradient is not None]
    of_square = None
    if of_squares is not None:
        terms.append(-2.0 * of_squares)
        of_square = 2.0 * of_squares * torch.exp(-values["log_sum_sq_probs"])
    of_p = torch.stack(terms).sum(0) if terms else None
    return of.get("mean", of_mean_logits), of_p, of_square


def _formula(form: _Form, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> tuple[Tensor, ...]:
    """What `_measure` computes, in operations that can be differentiated again."""
    if not form.is_logprob:
        losses = reference.compute_loss(form.loss._replace(reduction="none"), hidden, weight, labels, bias).to(
            form.dtype
        )
        return (losses[0], -losses[1]) if form.mean else (losses,)
    logprob, values = reference.compute_tokens(form.loss, hidden, weight, labels, bias)
    return (logprob, *(value.to(form.dtype) for value in values.values()))


def _reduced_forward(
    form: _Form, needs: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """The gradients are made in the forward."""
    count = _count(form, labels)
    upstream = hidden.new_ones((), dtype=torch.float32) if count is None else count.float().reciprocal()
    value, *gradients = form.operations.measure_and_differentiate(
        hidden, weight, labels, bias, upstream.expand(len(labels)), *form.terms, needs[:3]
    )
    return _reduced(form, value.sum(), count), gradients


def _reduced_backward(form: _Form, _needs: Sequence[bool], upstream: Tensor, *saved: Tensor) -> list[Tensor]:
    """What was made is scaled, in new memory each time: the graph may be kept, and what is returned is the caller's."""
    *gradients, hidden, _, _, _ = saved
    return [form.operations.scale(gradient, upstream, hidden.dtype) for gradient in gradients]


def _reduced_formula(form: _Form, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """What `_reduced_forward` computes, in operations that can be differentiated again."""
    return reference.compute_loss(form.loss, hidden, weight, labels, bias)
