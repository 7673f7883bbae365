"""Losses and log-probabilities, with their gradients, from the operations of a backend.

The gradients of a mean or a sum are made in the forward, where each logit is computed once. The backward scales them.
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
from fuseplug_backends.triton import differentiated_again, recording, vjp

from .. import reference
from ..reference import LogProbs, Loss
from .folded import folded


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
        measure: Takes the `Terms`, one by one, and whether an entropy and whether the mean of the log-probabilities of
            all words are asked for. Gives the value of each token, its entropy and mean if asked for, and what
            `differentiate` is to be given again, in float32.
        differentiate: Takes the gradient of the value; the gradient of the entropy, and the entropy, or ``None`` twice;
            the gradient of the mean or ``None``; what `measure` wanted kept, or ``None``; the terms; and which of the
            gradients of hidden, weight and bias are wanted. Gives these.
        measure_and_differentiate: Takes the gradient of the value, the terms, and which gradients are wanted. Gives the
            value and these.
        scale: Takes a tensor and a number, of no dimension and on its device. Gives their product, rounded once.
        serves: Whether the operations can be put between tensors and their gradients, here and now.
    """

    measure: Callable[..., list[Tensor]]
    differentiate: Callable[..., list[Tensor]]
    measure_and_differentiate: Callable[..., list[Tensor]]
    scale: Callable[[Tensor, Tensor], Tensor]
    serves: Callable[..., bool]


def compute(
    operations: Operations, loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
) -> Tensor:
    """`reference.compute` by *operations*, or itself where they do not serve."""
    how = _how(operations, loss, hidden, None)
    if how is None or not _serves(operations, hidden, weight, labels, bias):
        return by_reference(reference.compute, loss, hidden, weight, labels, bias)
    hidden, weight, labels = _matrix(hidden), _matrix(weight), labels.contiguous()
    if how.mean:
        losses, means = _measured(how, hidden, weight, labels, bias)
        return torch.stack((losses, -means))
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
    operations: Operations,
    loss: Loss,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    *,
    entropy: bool,
) -> LogProbs:
    """`reference.compute_logprob` by *operations*, or itself where they do not serve."""
    how = _how(operations, loss, hidden, entropy)
    if how is None or not _serves(operations, hidden, weight, labels, bias):
        return by_reference(reference.compute_logprob, loss, hidden, weight, labels, bias, entropy=entropy)
    found = _measured(how, _matrix(hidden), _matrix(weight), labels.contiguous(), bias)
    return LogProbs(found[0], found[1] if entropy else None)


class _How(NamedTuple):
    """What is not a tensor.

    Attributes:
        operations: What computes it.
        loss: As the reference has it.
        terms: As the operations have it.
        dtype: Of the result.
        entropy: For log-probabilities, whether there is an entropy too; ``None`` for a loss.
    """

    operations: Operations
    loss: Loss
    terms: Terms
    dtype: torch.dtype
    entropy: bool | None

    @property
    def mean(self) -> bool:
        """Whether there is the mean of all log-probabilities too."""
        return self.loss.label_smoothing is None

    @property
    def besides(self) -> tuple[bool, bool]:
        """What there is besides the value: an entropy, a mean."""
        return bool(self.entropy), self.mean


def _how(operations: Operations, loss: Loss, hidden: Tensor, entropy: bool | None) -> _How | None:
    """``None`` for steps that cannot be folded."""
    steps = folded(loss.steps)
    if steps is None:
        return None
    smoothing = loss.label_smoothing or 0.0
    of_label, of_all = (smoothing - 1.0, -smoothing) if entropy is None else (1.0, 0.0)
    wide = reference.FLOAT.kind in [step.kind for step in loss.steps]
    dtype = torch.float32 if wide else hidden.dtype
    return _How(operations, loss, Terms(loss.ignore_index, of_label, of_all, *steps), dtype, entropy)


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


def _count(how: _How, labels: Tensor) -> Tensor | None:
    """What the sum over tokens is divided by."""
    return (labels != how.loss.ignore_index).sum() if how.loss.reduction == "mean" else None


def _reduced(how: _How, total: Tensor, count: Tensor | None) -> Tensor:
    return _rounded(total if count is None else total / count, how.dtype)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """*tensor* in *dtype*, and itself if it is that already.

    A conversion that changes nothing is one more name for the same tensor. torch 2.11 compiles a function that returns
    one of both without its gradient.
    """
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _measured(how: _How, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The loss of each token, or its log-probability, and what there is besides."""
    if recording(hidden, weight, bias):
        recorded: tuple[Tensor, ...] = _Measured.apply(hidden, weight, bias, labels, how)  # type: ignore[no-untyped-call]
        return recorded
    found = how.operations.measure(hidden, weight, labels, bias, *how.terms, *how.besides)
    return _results(how, found)


def _results(how: _How, found: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple([_rounded(each, how.dtype) for each in found[: 1 + sum(how.besides)]])


class _Measured(torch.autograd.Function):
    """The backward computes the logits anew."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How
    ) -> tuple[Tensor, ...]:
        found = how.operations.measure(hidden, weight, labels, bias, *how.terms, *how.besides)
        ctx.how = how
        ctx.save_for_backward(hidden, weight, bias, labels, *found[1:])
        return _results(how, found)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, *found = ctx.saved_tensors
        how, wanted = ctx.how, list(ctx.needs_input_grad[:3])
        if differentiated_again() or not how.operations.serves(*upstream, hidden):
            needs = [*wanted, False, False]
            return tuple(vjp(_formula, (hidden, weight, bias, labels, how), needs, upstream))
        of_value, *of_others = [each.float() for each in upstream]
        of_entropy, entropy = (of_others.pop(0), found.pop(0)) if how.entropy else (None, None)
        of_mean = of_others.pop(0) if how.mean else None
        kept = found[-1] if len(found) > how.mean else None
        rest = (of_value, of_entropy, entropy, of_mean, kept, *how.terms, wanted)
        gradients = how.operations.differentiate(hidden, weight, labels, bias, *rest)
        return *_spread(wanted, gradients), None, None


def _formula(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How) -> tuple[Tensor, ...]:
    """What `_Measured` computes, in operations that can be differentiated again."""
    if how.entropy is None:
        losses = reference.compute(how.loss._replace(reduction="none"), hidden, weight, labels, bias).to(how.dtype)
        return (losses[0], -losses[1]) if how.mean else (losses,)
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
        value, *gradients = how.operations.measure_and_differentiate(
            hidden, weight, labels, bias, upstream.expand(len(labels)), *how.terms, wanted
        )
        ctx.how, ctx.wanted = how, wanted
        ctx.save_for_backward(hidden, weight, bias, labels, *gradients)
        return _reduced(how, value.sum(), count)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, *gradients = ctx.saved_tensors
        how = ctx.how
        if differentiated_again() or not how.operations.serves(upstream, hidden):
            needs = [*ctx.wanted, False, False]
            return *vjp(_reduced_formula, (hidden, weight, bias, labels, how), needs, (upstream,)), None
        # New memory each time: the graph may be kept, and what is returned is the caller's.
        found = [how.operations.scale(gradient, upstream) for gradient in gradients]
        return *_spread(ctx.wanted, found), None, None, None


def _reduced_formula(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How) -> Tensor:
    """What `_Reduced` computes, in operations that can be differentiated again."""
    return reference.compute(how.loss, hidden, weight, labels, bias)


def _spread(wanted: Sequence[bool], found: Sequence[Tensor]) -> list[Tensor | None]:
    rest = iter(found)
    return [next(rest) if need else None for need in wanted]
