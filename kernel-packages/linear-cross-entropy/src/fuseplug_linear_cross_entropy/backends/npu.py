"""The loss on Ascend NPUs, by operations of torch: matmuls for a chunk of tokens, the rest for a piece of a chunk.

Nothing here imports torch_npu: a tensor on an NPU means that torch_npu is loaded. Nothing waits for the device.

A mean or sum and its gradients take these launches in half precision. A piece is some tokens of a chunk, whose logits
are widened to float32:

================  ==================================================================================================
each call         19, each over one number per token
each chunk        2 matmuls, and 1 for the gradient of the weight; with several chunks 2 for each 16,384 words, because
                  the product is in half precision and the sum in float32
each piece        7: cast, log-softmax, gather, exp, product, scatter, cast; 1 more for a factor of the logits, 5 for a
                  cap, 2 for smoothing
the backward      for each gradient, and each 16,384 rows of it, 3: cast, product, cast; 2 for a sum in float32
================  ==================================================================================================

torch_npu's own ``npu_cross_entropy_loss`` is not used. It makes its gradient from log-probabilities in the dtype of the
logits, so the logits would have to be widened all the same. It has no entropy. Its page says that a negative
``ignore_index``, such as -100, ignores no label, that labels are within the vocabulary, and that there is no smoothing
if gradients are wanted. `torch.logsumexp` is not used, because no page says that it cannot overflow on an NPU;
``F.cross_entropy`` calls log-softmax there.
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
from ..reference import STATISTICS, Loss, Tokens
from . import recorded
from .chunks import Gradients, chunks, gradient_sums, rows_of_chunk
from .recorded import Terms

BUDGET = 1 << 29
"""Most bytes of logits in one of several chunks: 1536 tokens of 151,936 words in half precision.

With several chunks, each moves 12 bytes for each element of the weight's gradient, whose product takes ``2 · rows``
operations. At 376 TFLOP/s and 1.6 TB/s, as on an Atlas A2, moving takes 1410 / rows of the product's own time.
"""

WORKING = 1 << 27
"""Most bytes of a tensor in float32. There are two at a time, and up to two more with a cap or statistics.

For 151,936 words, such a tensor has 220 tokens. The host launches their operations in less time than the device takes
to move them.
"""

_WORDS = 1 << 14
"""Rows of a gradient that are scaled at a time, in float32."""

_NEVER = -1e4
"""A finite log of a probability that is 0 in float32. It replaces minus infinity, because its product with 0 is 0."""


def compute(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor | Tokens:
    """`fuseplug_linear_cross_entropy.reference.linear_cross_entropy` on an NPU: the same arguments, result and errors.

    The result is the reference's up to rounding; everything between the matmuls is computed in float32. A label outside
    of the vocabulary makes the loss NaN, because an error would have to wait for the device.

    The reference computes calls with dtypes other than float16, bfloat16 and float32, with empty tensors or with two
    tanh steps, calls inside ``torch.compile``, and calls for tracers, functorch transforms and tensor subclasses. It
    also computes a backward that is to be differentiated again.
    """
    return recorded.compute(_OPERATIONS, loss, hidden, weight, labels, bias)


def compute_tokens(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tokens:
    """`fuseplug_linear_cross_entropy.reference.linear_logprob` on an NPU: the same arguments, result and errors.

    All else is as for `linear_cross_entropy`.
    """
    return recorded.compute_tokens(_OPERATIONS, loss, hidden, weight, labels, bias)


linear_cross_entropy = computed_by(compute, reference.linear_cross_entropy)
linear_logprob = computed_by(compute_tokens, reference.linear_logprob)


def _measure(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *arguments: Any) -> list[Tensor]:
    *numbers, asked, _ = arguments
    names = [name for name, is_asked in zip(recorded.BESIDES, asked, strict=True) if is_asked]
    tokens = _Tokens(labels, Terms(*numbers), len(weight), mean="mean" in names)
    for at, logits in _chunks(hidden, weight, bias):
        for piece, part in tokens.pieces(at, logits):
            y, _ = tokens.after_steps(part)
            logp = torch.log_softmax(y, -1)
            tokens.take(logp, piece)
            tokens.take_statistics(names, y, logp, piece)
    return [tokens.values(), *(tokens.counted(tokens.besides(name)) for name in names)]


def _differentiate(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    upstream: Tensor,
    of_entropy: Tensor | None,
    entropy: Tensor | None,
    of_mean: Tensor | None,
    of_p: Tensor | None,
    of_square: Tensor | None,
    _lse: None,
    _logits: None,
    *arguments: Any,
) -> list[Tensor]:
    *numbers, wanted = arguments
    tokens = _Tokens(labels, Terms(*numbers), len(weight))
    coefficients = tokens.coefficients(upstream, of_entropy, entropy, of_mean, of_p, of_square)
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
    coefficients = tokens.coefficients(upstream)
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
    """Memory for the *wanted* gradients, and the `Gradients` that fill it."""
    sums = gradient_sums(hidden, weight, bias, wanted, _rows(hidden, weight, of_weight=wanted[1]))
    return sums, Gradients(sums, wanted, hidden, weight)


def _rows(hidden: Tensor, weight: Tensor, of_weight: bool) -> int:
    return rows_of_chunk(len(hidden), len(weight) * hidden.element_size(), BUDGET, weight if of_weight else None)


class _Coefficients(NamedTuple):
    """Coefficients in the formula of dz for each token, ``(tokens, 1)``. They include dy/dz, except that of a tanh.

    Attributes:
        label: The summand of the label.
        p: The factor of each probability.
        p_logp: The factor of each probability times its logarithm; ``None`` without an entropy.
        even: The summand of each word; ``None`` without smoothing and mean.
        p_square: The factor of each probability squared; ``None`` without the logarithm of their sum.
    """

    label: Tensor
    p: Tensor
    p_logp: Tensor | None
    even: Tensor | None
    p_square: Tensor | None


class _Tokens:
    """Computes these formulas, with p the probabilities of a token, l its label, H its entropy and V the word count.

    The formulas of the other results are in `reference.STATISTICS`.

        y = outer · z, or outer · tanh(inner · z)
        value = picked · log p_l + spread · mean(log p),  H = −Σ p · log p

        dz_j = (u · picked · (1[j = l] − p_j) + (u · spread + m) · (1/V − p_j) − e · p_j · (log p_j + H)
                + a · p_j + b · p_j²) · dy/dz

    where u is the gradient of the value, e that of H, and m that of mean(log p); a and b are the further factors of p
    and p² in `recorded`.
    """

    def __init__(self, labels: Tensor, terms: Terms, width: int, *, mean: bool = False) -> None:
        self._terms, self._width, self._averaged = terms, width, mean or terms.spread != 0.0
        self._ignored = labels == terms.ignore_index
        self._labels = labels.clamp(0, width - 1).unsqueeze(-1)
        self._unknown = self._labels.squeeze(-1) != labels
        self._of_labels: list[Tensor] = []
        self._means: list[Tensor] = []
        self._statistics: dict[str, list[Tensor]] = {name: [] for name in STATISTICS}

    def counted(self, numbers: Tensor) -> Tensor:
        """*numbers*, one for each token, with 0 for ignored tokens, and NaN for labels outside of the vocabulary."""
        return numbers.masked_fill(self._unknown, math.nan).masked_fill_(self._ignored, 0.0)

    def pieces(self, at: slice, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the *logits* of the tokens *at* in pieces of a few tokens, each with its tokens."""
        rows = max(1, WORKING // (4 * self._width))
        for first in range(0, len(logits), rows):
            part = logits[first : first + rows]
            yield slice(at.start + first, at.start + first + len(part)), part

    def after_steps(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """y, and tanh(inner · z) if there is one, in float32. *logits* in float32 are overwritten."""
        terms, y = self._terms, logits.float()
        if terms.capped:
            tanh = y.mul_(terms.inner).tanh_()
            return tanh * terms.outer, tanh
        return (y if terms.outer == 1.0 else y.mul_(terms.outer)), None

    def log_probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The log of p in new memory, and tanh(inner · z) if there is one. *logits* in float32 are overwritten."""
        y, tanh = self.after_steps(logits)
        return torch.log_softmax(y, -1), tanh

    def take(self, logp: Tensor, piece: slice) -> None:
        """Keep the numbers from which the values of the tokens of *piece* are made."""
        self._of_labels.append(logp.gather(-1, self._labels[piece]))
        if self._averaged:
            self._means.append(logp.mean(-1))

    def take_statistics(self, names: Sequence[str], y: Tensor, logp: Tensor, piece: slice) -> None:
        """Compute and keep the statistics *names* of the tokens of *piece*. *logp* is overwritten."""
        parts: dict[str, Tensor] = {}
        if "is_top1" in names:
            parts["is_top1"] = (y.argmax(-1) == self._labels[piece].squeeze(-1)).float()
        if "mean_logits" in names:
            parts["mean_logits"] = y.mean(-1)
        if "logsumexp" in names:
            parts["logsumexp"] = y.amax(-1) - logp.amax(-1)
        if "log_sum_sq_probs" in names:
            parts["log_sum_sq_probs"] = torch.log((2.0 * logp).exp_().sum(-1))
        if "entropy" in names:
            parts["entropy"] = logp.clamp_(min=_NEVER).mul_(logp.exp()).sum(-1).neg_()
        for name, part in parts.items():
            self._statistics[name].append(part)

    def besides(self, name: str) -> Tensor:
        """The statistic *name* of all tokens, or ``"mean"``, once all pieces were taken."""
        return self.means() if name == "mean" else torch.cat(self._statistics[name])

    def values(self) -> Tensor:
        """The values of all tokens, once all pieces were taken."""
        value = torch.cat(self._of_labels).squeeze(-1)
        if self._terms.picked != 1.0:
            value.mul_(self._terms.picked)
        if self._terms.spread:
            value.add_(self.means(), alpha=self._terms.spread)
        return self.counted(value)

    def means(self) -> Tensor:
        """The mean log-probability of all words, for all tokens, once all pieces were taken."""
        return torch.cat(self._means)

    def coefficients(
        self,
        upstream: Tensor,
        of_entropy: Tensor | None = None,
        entropy: Tensor | None = None,
        of_mean: Tensor | None = None,
        of_p: Tensor | None = None,
        of_square: Tensor | None = None,
    ) -> _Coefficients:
        """The coefficients of all tokens, for the gradients of the value and of those other results that have one."""
        terms = self._terms
        slope = terms.outer * terms.inner
        u = self.counted(upstream).unsqueeze(-1)
        label, even, p_logp, p_square = u * (terms.picked * slope), None, None, None
        p = -label
        if terms.spread or of_mean is not None:
            even = u * (terms.spread * slope / self._width)
            if of_mean is not None:
                even.add_(self.counted(of_mean).unsqueeze(-1), alpha=slope / self._width)
            p.sub_(even, alpha=self._width)
        if of_entropy is not None and entropy is not None:
            p_logp = self.counted(of_entropy).unsqueeze(-1) * -slope
            p.addcmul_(p_logp, entropy.unsqueeze(-1))
        if of_p is not None:
            p.add_(self.counted(of_p).unsqueeze(-1), alpha=slope)
        if of_square is not None:
            p_square = self.counted(of_square).unsqueeze(-1) * slope
        return _Coefficients(label, p, p_logp=p_logp, even=even, p_square=p_square)

    def gradient(self, logp: Tensor, tanh: Tensor | None, piece: slice, by: _Coefficients) -> Tensor:
        """The gradient dz of the tokens of *piece*, in the memory of *logp*."""
        factor = by.p[piece]
        if by.p_logp is not None:
            factor = torch.addcmul(factor, logp.clamp_(min=_NEVER), by.p_logp[piece])
        grad = logp.exp_()
        if by.p_square is not None:
            factor = torch.addcmul(factor, grad, by.p_square[piece])
        grad.mul_(factor)
        if by.even is not None:
            grad.add_(by.even[piece])
        grad.scatter_add_(-1, self._labels[piece], by.label[piece])
        return grad if tanh is None else grad.addcmul_(grad * tanh, tanh, value=-1.0)
