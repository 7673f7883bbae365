"""The logits of a chunk of tokens at a time, and the gradients that all chunks add up to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fuseplug_backends.products import matmul

_ROWS = 256
"""Rows of the tallest tile of a matmul. The rows of larger chunks are a multiple of it, except for the last chunk."""

_WORDS = 1 << 14
"""Rows of the weight's gradient whose product is held in half precision at a time, before it is added in float32."""


def rows_of_chunk(tokens: int, row_bytes: int, budget: int, sum_of: Tensor | None = None) -> int:
    """The number of tokens in a chunk, if the logits of a token take *row_bytes*, and those of a chunk *budget* bytes.

    With several chunks, the gradient of the weight *sum_of*, if it is wanted, is also needed in float32, unless it is
    in float32 anyway. A single chunk does not need that memory, so its logits may have it.
    """
    spared = 0 if sum_of is None or sum_of.dtype is torch.float32 else 4 * sum_of.numel()
    if tokens * row_bytes <= budget + spared:
        return tokens
    most = max(1, budget // row_bytes)
    return most // _ROWS * _ROWS or most


def chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor, tokens: Iterable[slice] | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Compute the logits of one chunk of tokens after another, in the same memory.

    Args:
        hidden: ``(tokens, hidden)``.
        weight: ``(vocabulary, hidden)``.
        bias: ``(vocabulary,)`` or ``None``.
        buffer: That memory, ``(rows, at least vocabulary)``, in the dtype of *hidden*.
        tokens: The tokens of each chunk; by default, every chunk but the last has as many as *buffer* has rows.

    Yields:
        The tokens of a chunk, and their logits, which the caller may overwrite.
    """
    firsts = range(0, len(hidden), len(buffer))
    for at in tokens or [slice(first, min(first + len(buffer), len(hidden))) for first in firsts]:
        logits = buffer[: at.stop - at.start, : len(weight)]
        # With out=, autocast around a backward has no effect.
        if bias is None:
            matmul(hidden[at], weight.t(), logits)
        else:
            torch.addmm(bias, hidden[at], weight.t(), out=logits)
        yield at, logits


def gradient_sums(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool], rows: int
) -> list[Tensor]:
    """Memory for the *wanted* gradients of hidden, weight and bias, for chunks of *rows* tokens.

    Each has the shape of its tensor. Gradients that are added up are in float32: that of the weight if there are
    several chunks, and that of the bias. The others have the dtype of *hidden*.
    """
    of_weight = hidden.dtype if hidden.shape[0] <= rows else torch.float32  # a compiler would take len() for a constant
    every = zip((hidden, weight, bias), (hidden.dtype, of_weight, torch.float32), wanted, strict=True)
    return [
        torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
        for tensor, dtype, need in every
        if need and tensor is not None
    ]


class Gradients:
    """The gradients of hidden, weight and bias; those of weight and bias are sums over the tokens.

    Args:
        sums: The memory to fill, from `gradient_sums`.
        wanted: As for `gradient_sums`.
        hidden: As for `chunks`.
        weight: As for `chunks`.
    """

    def __init__(self, sums: Sequence[Tensor], wanted: Sequence[bool], hidden: Tensor, weight: Tensor) -> None:
        memory = iter(sums)
        self._of_hidden, self._of_weight, self._of_bias = (next(memory, None) if need else None for need in wanted)
        self._hidden, self._weight = hidden, weight
        if self._of_bias is not None:
            self._of_bias.zero_()

    def add(self, at: slice, of_logits: Tensor) -> None:
        """Add the part of the tokens *at*, from the gradient of their logits."""
        if self._of_hidden is not None:
            matmul(of_logits, self._weight, self._of_hidden[at])
        if self._of_weight is not None:
            _add_product(self._of_weight, of_logits.t(), self._hidden[at], first=at.start == 0)
        if self._of_bias is not None:
            self._of_bias += of_logits.sum(0, dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Add ``left @ right`` to *total*; the *first* product overwrites *total* instead."""
    if total.dtype is left.dtype:
        if first:
            matmul(left, right, total)
        else:
            total.addmm_(left, right)
    elif _adds_in_float32(total):
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=0 if first else 1, out=total)
    else:
        for word in range(0, len(total), _WORDS):
            some = slice(word, word + _WORDS)
            product = right.new_empty(total[some].shape)
            matmul(left[some], right, product)
            into = total[some].copy_ if first else total[some].add_
            into(product)


def _adds_in_float32(total: Tensor) -> bool:
    """Whether a product of half-precision matrices can be added to a float32 one: torch 2.8 and later, with CUDA."""
    return total.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.addmm, "dtype_out")
