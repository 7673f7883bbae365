"""The loss on Ascend NPUs, by operations of torch: matmuls for a chunk of tokens, all between them for a piece of it.

Nothing here imports torch_npu: tensors on an NPU mean that it is loaded. Nothing waits for the device.

What is launched, in half precision, for a mean or sum and its gradients, where a piece is some tokens of a chunk whose
logits are widened to float32:

================  ==================================================================================================
each call         19 over a number for each token
each chunk        2 matmuls, and for the gradient of the weight 1; with several chunks 2 for each 16,384 words, because
                  the product is in half precision and the sum in float32
each piece        7: cast, log-softmax, that of the label, exp, product, that of the label, cast; 1 more for a factor of
                  the logits, 5 for a cap, 2 for smoothing
the backward      for each gradient, and each 16,384 rows of it, 3: cast, product, cast; 2 for a sum in float32
================  ==================================================================================================

torch_npu's own ``npu_cross_entropy_loss`` is not used. Its log-probabilities, of which its gradient is made, have the
dtype of the logits, so these would have to be widened all the same; it has no entropy; and by its page a negative
``ignore_index``, such as -100, ignores no label, labels are within the vocabulary, and where gradients are wanted there
is no smoothing. `torch.logsumexp` is not used because no page says that it cannot overflow on an NPU; log-softmax is
what ``F.cross_entropy`` calls there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import plain

from .. import reference
from ..reference import LogProbs, Loss
from . import recorded
from .chunks import Gradients, chunks, gradient_sums, rows_of_chunk
from .recorded import Terms

BUDGET = 1 << 29
"""Bytes of the logits of one of several chunks: 1536 tokens of 151,936 words in half precision.

With several chunks 12 bytes are moved for each element of the weight's gradient, and ``2 · rows`` operations are its
product: by 376 TFLOP/s and 1.6 TB/s, those of an Atlas A2, that takes 1410 / rows of the product's own time.
"""

WORKING = 1 << 27
"""Bytes of each of the tensors in float32, of which there are two at a time, and up to two more with a cap or entropy.

For 151,936 words they have 220 tokens, whose launches take the host less than moving them takes the device.
"""

_WORDS = 1 << 14
"""Rows of a gradient that are scaled at a time, in float32."""

_NEVER = -1e4
"""The log of a probability that is 0 in float32, and finite: times 0 it is 0, as that of minus infinity has to be."""


def compute(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
    """`fuseplug_linear_cross_entropy.reference.linear_cross_entropy` on an NPU: the same arguments, result and errors.

    The result is the reference's up to rounding: all between the matmuls is computed in float32. A label outside of
    the vocabulary makes the loss NaN, because an error would be waited for.

    For that call it is the reference: of other dtypes than float16, bfloat16 and float32; of empty tensors; of two tanh
    one after the other; inside ``torch.compile``; to tracers, functorch transforms and subclasses. So is a backward
    that is to be differentiated again.
    """
    return recorded.compute(_OPERATIONS, loss, hidden, weight, labels, bias)


def compute_logprob(
    loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *, entropy: bool
) -> LogProbs:
    """`fuseplug_linear_cross_entropy.reference.linear_logprob` on an NPU: the same arguments, result and errors.

    All else is as for `linear_cross_entropy`.
    """
    return recorded.compute_logprob(_OPERATIONS, loss, hidden, weight, labels, bias, entropy=entropy)


linear_cross_entropy = computed_by(compute, reference.linear_cross_entropy)
linear_logprob = computed_by(compute_logprob, reference.linear_logprob)


def _measure(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *arguments: Any) -> list[Tensor]:
    *numbers, entropy, mean, _ = arguments
    tokens = _Tokens(labels, Terms(*numbers), len(weight), mean=mean)
    entropies = []
    for at, logits in _chunks(hidden, weight, bias):
        for piece, part in tokens.pieces(at, logits):
            logp, _ = tokens.log_probabilities(part)
            tokens.take(logp, piece)
            if entropy:
                entropies.append(logp.clamp_(min=_NEVER).mul_(logp.exp()).sum(-1))
    results = [tokens.values()]
    if entropy:
        results.append(tokens.counted(torch.cat(entropies).neg_()))
    if mean:
        results.append(tokens.counted(tokens.means()))
    return results


def _differentiate(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    upstream: Tensor,
    of_entropy: Tensor | None,
    entropy: Tensor | None,
    of_mean: Tensor | None,
    _lse: None,
    _logits: None,
    *arguments: Any,
) -> list[Tensor]:
    *numbers, wanted = arguments
    tokens = _Tokens(labels, Terms(*numbers), len(weight))
    coefficients = tokens.coefficients(upstream, of_entropy=of_entropy, entropy=entropy, of_mean=of_mean)
    results, gradients = _gradients(hidden, weight, bias, wanted)
    for at, logits in _chunks(hidden, weight, bias, of_weight=wanted[1]):
        for piece, part in tokens.pieces(at, logits):
            part.copy_(tokens.gradient(*tokens.log_probabilities(part), piece, coefficients))
        gradients.add(at, logits)
    return results


def _measure_and_differentiate(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, upstream: Tensor, *arguments: Any
) -> list[Tensor]:
    *numbers, wanted = arguments
    tokens = _Tokens(labels, Terms(*numbers), len(weight))
    coefficients = tokens.coefficients(upstream, of_entropy=None, entropy=None, of_mean=None)
    results, gradients = _gradients(hidden, weight, bias, wanted)
    for at, logits in _chunks(hidden, weight, bias, of_weight=wanted[1]):
        for piece, part in tokens.pieces(at, logits):
            logp, tanh = tokens.log_probabilities(part)
            tokens.take(logp, piece)
            part.copy_(tokens.gradient(logp, tanh, piece, coefficients))
        gradients.add(at, logits)
    return [tokens.values(), *results]


def _scale(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty_like(gradient, dtype=dtype)
    for first in range(0, len(gradient), _WORDS):
        some = slice(first, first + _WORDS)
        result[some].copy_(gradient[some].float() * factor)
    return result


_OPERATIONS = recorded.Operations(
    _measure, _differentiate, _measure_and_differentiate, _scale, serves=plain, keeps=lambda *_: False
)


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, of_weight: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    rows = min(_rows(hidden, weight, of_weight), len(hidden))
    return chunks(hidden, weight, bias, hidden.new_empty((rows, len(weight))))


def _gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]
) -> tuple[list[Tensor], Gradients]:
    """Memory for the gradients that are wanted, and what fills it."""
    sums = gradient_sums(hidden, weight, bias, wanted, _rows(hidden, weight, of_weight=wanted[1]))
    return sums, Gradients(sums, wanted, hidden, weight)


def _rows(hidden: Tensor, weight: Tensor, of_weight: bool) -> int:
    return rows_of_chunk(len(hidden), len(weight) * hidden.element_size(), BUDGET, weight if of_weight else None)


class _Coefficients(NamedTuple):
    """By what things are multiplied for each token, ``(tokens, 1)``, dy/dz included but for a cap's.

    Attributes:
        label: The 1 of the label.
        p: Each probability.
        p_logp: Each probability times its logarithm; ``None`` without an entropy.
        even: What is added to each word; ``None`` without smoothing and mean.
    """

    label: Tensor
    p: Tensor
    p_logp: Tensor | None
    even: Tensor | None


class _Tokens:
    """The formulas, with p the probabilities of a token, l its label, H its entropy and V the vocabulary.

        y = outer · z, or outer · tanh(inner · z)
        value = picked · log p_l + spread · mean(log p),  H = −Σ p · log p

        dz_j = (u · picked · (1[j = l] − p_j) + (u · spread + m) · (1/V − p_j) − e · p_j · (log p_j + H)) · dy/dz

    where u is the gradient of the value, e that of H, and m that of mean(log p).
    """

    def __init__(self, labels: Tensor, terms: Terms, width: int, *, mean: bool = False) -> None:
        self._terms, self._width, self._averaged = terms, width, mean or terms.spread != 0.0
        self._ignored = labels == terms.ignore_index
        self._labels = labels.clamp(0, width - 1).unsqueeze(-1)
        self._unknown = self._labels.squeeze(-1) != labels
        self._of_labels: list[Tensor] = []
        self._means: list[Tensor] = []

    def counted(self, numbers: Tensor) -> Tensor:
        """One number of each token: 0 where it is ignored, NaN where its label is outside of the vocabulary."""
        return numbers.masked_fill(self._unknown, math.nan).masked_fill_(self._ignored, 0.0)

    def pieces(self, at: slice, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The *logits* of the tokens *at*, a few tokens at a time, with which these are."""
        rows = max(1, WORKING // (4 * self._width))
        for first in range(0, len(logits), rows):
            part = logits[first : first + rows]
            yield slice(at.start + first, at.start + first + len(part)), part

    def log_probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The log of p in new memory, and tanh(inner · z) if there is one. *logits* in float32 are written over."""
        terms, y = self._terms, logits.float()
        if terms.capped:
            tanh = y.mul_(terms.inner).tanh_()
            return torch.log_softmax(tanh * terms.outer, -1), tanh
        if terms.outer != 1.0:
            y.mul_(terms.outer)
        return torch.log_softmax(y, -1), None

    def take(self, logp: Tensor, piece: slice) -> None:
        """Take what the value of the tokens of *piece* is made of."""
        self._of_labels.append(logp.gather(-1, self._labels[piece]))
        if self._averaged:
            self._means.append(logp.mean(-1))

    def values(self) -> Tensor:
        """The value of all tokens, once they were taken."""
        value = torch.cat(self._of_labels).squeeze(-1)
        if self._terms.picked != 1.0:
            value.mul_(self._terms.picked)
        if self._terms.spread:
            value.add_(self.means(), alpha=self._terms.spread)
        return self.counted(value)

    def means(self) -> Tensor:
        """The mean of the log-probabilities of all words, of all tokens, once they were taken."""
        return torch.cat(self._means)

    def coefficients(
        self, upstream: Tensor, of_entropy: Tensor | None, entropy: Tensor | None, of_mean: Tensor | None
    ) -> _Coefficients:
        """Of all tokens, for the gradients of the value, the entropy and the mean, as far as there are these."""
        terms = self._terms
        slope = terms.outer * terms.inner
        u = self.counted(upstream).unsqueeze(-1)
        label, even, p_logp = u * (terms.picked * slope), None, None
        p = -label
        if terms.spread or of_mean is not None:
            even = u * (terms.spread * slope / self._width)
            if of_mean is not None:
                even.add_(self.counted(of_mean).unsqueeze(-1), alpha=slope / self._width)
            p.sub_(even, alpha=self._width)
        if of_entropy is not None and entropy is not None:
            p_logp = self.counted(of_entropy).unsqueeze(-1) * -slope
            p.addcmul_(p_logp, entropy.unsqueeze(-1))
        return _Coefficients(label, p, p_logp=p_logp, even=even)

    def gradient(self, logp: Tensor, tanh: Tensor | None, piece: slice, by: _Coefficients) -> Tensor:
        """The gradient dz of the tokens of *piece*, in the memory of *logp*."""
        if by.p_logp is None:
            grad = logp.exp_().mul_(by.p[piece])
        else:
            factor = torch.addcmul(by.p[piece], logp.clamp_(min=_NEVER), by.p_logp[piece])
            grad = logp.exp_().mul_(factor)
        if by.even is not None:
            grad.add_(by.even[piece])
        grad.scatter_add_(-1, self._labels[piece], by.label[piece])
        return grad if tanh is None else grad.addcmul_(grad * tanh, tanh, value=-1.0)
