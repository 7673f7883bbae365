"""Losses and log-probabilities, with their gradients, from the operations of a backend.

The forward makes the gradients of a mean or a sum, so each logit is computed once. The backward scales them. Sums in
float32 stay in float32 until then, and are rounded once. A backend may keep the logits instead. Without a reduction,
and for log-probabilities, the gradient of each token is known only in the backward, which computes the logits again. So
does the backward in float16: there the gradient of a mean is too small for its dtype unless the loss is scaled, and
only the gradient of the loss says by how much.
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
"""The results that a token may have besides its value: the mean log-probability of all words, and the statistics."""


class Terms(NamedTuple):
    """The numbers that define the value of a token; *inner*, *outer* and *capped* are the steps (see `folded`).

    With p the probabilities and l the label, the value is ``picked · log p_l + spread · mean(log p)``: a loss, smoothed
    or not, or a log-probability. It is 0 for the label *ignore_index*, and NaN for a label outside of the vocabulary.
    """

    ignore_index: int
    picked: float
    spread: float
    inner: float
    outer: float
    capped: bool


class Operations(NamedTuple):
    """The operations of a backend.

    Arguments are positional. First come hidden, weight, labels and bias, as for `reference.compute`: not empty, of one
    dtype of float16, bfloat16 and float32, each matrix with a stride of 1, labels contiguous. Then:

    Attributes:
        measure: Takes the `Terms`, one by one, whether each of `BESIDES` is wanted, and whether the logits are. Returns
            the value of each token; those of `BESIDES` that are wanted, in that order; the numbers to pass to
            `differentiate` later, all in float32; and the logits if wanted.
        differentiate: Takes the gradient of the value; the gradient of the entropy, and the entropy, or ``None`` twice;
            the gradient of the mean, or ``None``; a further factor of each probability p, or ``None``; one of each p²,
            or ``None``; the numbers that `measure` wanted to pass on, or ``None``; the logits, or ``None``; the terms;
            and which gradients of hidden, weight and bias are wanted. Returns these; sums may be in float32.
        measure_and_differentiate: Takes the gradient of the value, the terms, and which gradients are wanted. Returns
            the value and these gradients; sums may be in float32.
        scale: Takes a tensor, a number as a tensor without dimensions on the same device, and a dtype. Returns the
            product in that dtype, rounded once.
        serves: Takes tensors. Says whether the operations can be put between these and their gradients, here and now.
        keeps: Takes hidden and weight. Says whether the logits of a mean or a sum are kept for the backward, instead of
            gradients that the backward scales.
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
    """`reference.compute`, computed by *operations*, or by the reference where these do not serve."""
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
    """`reference.compute_tokens`, computed by *operations*, or by the reference where these do not serve."""
    form = _form(operations, loss, hidden, is_logprob=True)
    if form is None or not _serves(operations, hidden, weight, labels, bias):
        return by_reference(reference.compute_tokens, loss, hidden, weight, labels, bias)
    logprob, *values = _measured(form, _matrix(hidden), _matrix(weight), labels.contiguous(), bias)
    by_name = dict(zip(form.besides, values, strict=True))
    return logprob, {name: value != 0 if name == "is_top1" else value for name, value in by_name.items()}


class _Form(NamedTuple):
    """The arguments that are not tensors.

    Attributes:
        operations: The operations of the backend.
        loss: The loss, for the reference.
        terms: The loss, for the operations.
        dtype: The dtype of the result.
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
        """Whether the mean of all log-probabilities is wanted, too."""
        return self.loss.label_smoothing is None

    @property
    def besides(self) -> tuple[str, ...]:
        """Those of `BESIDES` that are wanted, in that order."""
        return ("mean",) if self.mean else self.loss.statistics


def _form(operations: Operations, loss: Loss, hidden: Tensor, *, is_logprob: bool) -> _Form | None:
    """The `_Form` for *loss*; ``None`` for steps that cannot be folded."""
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
    """*tensor* in a layout that a matmul takes; otherwise each matmul would copy it."""
    return tensor if 1 in tensor.stride() else tensor.contiguous()


def _count(form: _Form, labels: Tensor) -> Tensor | None:
    """The number by which the sum over tokens is divided; ``None`` without a mean."""
    return (labels != form.loss.ignore_index).sum() if form.loss.reduction == "mean" else None


def _reduced(form: _Form, total: Tensor, count: Tensor | None) -> Tensor:
    return _rounded(total if count is None else total / count, form.dtype)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """*tensor* in *dtype*; *tensor* itself if it already has that dtype.

    A conversion that changes nothing is a second name for the same tensor, and torch 2.11 compiles a function that
    returns one of the two without its gradient.
    """
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _measured(form: _Form, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The loss of each token, or its log-probability, and the results besides."""
    measured = differentiable(_measure, _differentiate, _formula, form.operations.serves)
    results: tuple[Tensor, ...] = measured(form, hidden, weight, bias, labels)
    return results


def _measure(
    form: _Form, _: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
    asked = [name in form.besides for name in BESIDES]
    value, *kept = form.operations.measure(hidden, weight, labels, bias, *form.terms, asked, form.keep)
    # Copies of what is kept, because the caller may write into results.
    besides = [number.to(form.dtype, copy=True) for number in kept[: len(form.besides)]]
    return (_rounded(value, form.dtype), *besides), kept


def _differentiate(form: _Form, needs: Sequence[bool], *tensors: Any) -> list[Tensor]:
    """The wanted gradients. The logits are computed again unless they were kept."""
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
    """The gradient of the mean, and the further factors of each p and each p², for gradients *of* results by name.

    With respect to the logit of a word, the derivative of logsumexp is p; that of mean_logits is (1/V − p) + p, whose
    first term is the derivative of the mean; and that of log Σ p² is 2 · p² / Σ p² − 2 · p.
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
    """The results of `_measure`, from operations that can be differentiated again."""
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
    """The loss, and its gradients, which the forward makes."""
    count = _count(form, labels)
    upstream = hidden.new_ones((), dtype=torch.float32) if count is None else count.float().reciprocal()
    value, *gradients = form.operations.measure_and_differentiate(
        hidden, weight, labels, bias, upstream.expand(len(labels)), *form.terms, needs[:3]
    )
    return _reduced(form, value.sum(), count), gradients


def _reduced_backward(form: _Form, _needs: Sequence[bool], upstream: Tensor, *saved: Tensor) -> list[Tensor]:
    """The saved gradients, scaled. They are in new memory: the graph may be kept, and the result is the caller's."""
    *gradients, hidden, _, _, _ = saved
    return [form.operations.scale(gradient, upstream, hidden.dtype) for gradient in gradients]


def _reduced_formula(form: _Form, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """The loss of `_reduced_forward`, from operations that can be differentiated again."""
    return reference.compute_loss(form.loss, hidden, weight, labels, bias)
