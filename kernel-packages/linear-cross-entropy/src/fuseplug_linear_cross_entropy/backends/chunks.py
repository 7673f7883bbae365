"""The logits of some tokens at a time, and the gradients that are made of those of all chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ROWS = 256
"""The tallest tile of a matmul: of chunks with more rows, only the last has no multiple of it."""

_WORDS = 1 << 14
"""Rows of the weight's gradient for which a product in half precision is held before it is added in float32."""


def rows_of_chunk(tokens: int, row_bytes: int, budget: int) -> int:
    """How many of *tokens* a chunk has if the logits of one take *row_bytes*, and those of a chunk *budget* bytes."""
    most = max(1, budget // row_bytes)
    if tokens <= most:
        return tokens
    return most // _ROWS * _ROWS or most


def chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: int, row_stride: int
) -> Iterator[tuple[slice, Tensor]]:
    """Compute the logits of *rows* tokens after another, in the dtype of *hidden*, each time in the same memory.

    Args:
        hidden: ``(tokens, hidden)``.
        weight: ``(vocabulary, hidden)``.
        bias: ``(vocabulary,)`` or ``None``.
        rows: Of all chunks but the last.
        row_stride: How far apart rows lie in memory, at least ``vocabulary``.

    Yields:
        Which tokens they are, and their logits, which may be written over.
    """
    buffer = hidden.new_empty((min(rows, len(hidden)), row_stride))[:, : len(weight)]
    for first in range(0, len(hidden), rows):
        at = slice(first, min(first + rows, len(hidden)))
        logits = buffer[: at.stop - first]
        # With out=, autocast around a backward has no say.
        if bias is None:
            torch.mm(hidden[at], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[at], weight.t(), out=logits)
        yield at, logits


class Gradients:
    """The gradients of hidden, weight and bias.

    That of the weight is a sum over tokens. In half precision those of several chunks are added in float32, and rounded
    once, at the end.

    Args:
        of_hidden: What to fill; ``None`` if that gradient is not wanted.
        of_weight: Likewise.
        of_bias: Likewise.
        hidden: As for `chunks`.
        weight: As for `chunks`.
        rows: As for `chunks`.
    """

    def __init__(
        self,
        of_hidden: Tensor | None,
        of_weight: Tensor | None,
        of_bias: Tensor | None,
        hidden: Tensor,
        weight: Tensor,
        rows: int,
    ) -> None:
        self._of_hidden, self._of_weight, self._of_bias = of_hidden, of_weight, of_bias
        self._hidden, self._weight = hidden, weight
        self._weight_sum = self._bias_sum = None
        if of_weight is not None:
            once = len(hidden) <= rows
            self._weight_sum = of_weight if once else torch.empty_like(of_weight, dtype=torch.float32)
        if of_bias is not None:
            self._bias_sum = torch.zeros_like(of_bias, dtype=torch.float32)

    def add(self, at: slice, of_logits: Tensor) -> None:
        """Take the gradient of the logits of the tokens *at*."""
        if self._of_hidden is not None:
            torch.mm(of_logits, self._weight, out=self._of_hidden[at])
        if self._weight_sum is not None:
            _add_product(self._weight_sum, of_logits.t(), self._hidden[at], first=at.start == 0)
        if self._bias_sum is not None:
            self._bias_sum += of_logits.sum(0, dtype=torch.float32)

    def finish(self) -> None:
        """Round what was added up."""
        for result, total in ((self._of_weight, self._weight_sum), (self._of_bias, self._bias_sum)):
            if result is not None and total is not None and result is not total:
                result.copy_(total)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Add ``left @ right`` to *total*, of which the *first* product takes the place."""
    if total.dtype is left.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)
    elif _adds_in_float32(total):
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=0 if first else 1, out=total)
    else:
        for word in range(0, len(total), _WORDS):
            some = slice(word, word + _WORDS)
            product = right.new_empty(total[some].shape)
            torch.mm(left[some], right, out=product)
            if first:
                total[some].copy_(product)
            else:
                total[some].add_(product)


def _adds_in_float32(total: Tensor) -> bool:
    """Whether a product of half-precision matrices can be added to a float32 one: torch 2.8 and later, with CUDA."""
    return total.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.addmm, "dtype_out")
