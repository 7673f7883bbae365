"""The operations: each cuts the tokens into chunks, and for each chunk calls torch's matmul and launches a program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from fuseplug_backends.triton import operation

from ..chunks import Gradients, chunks, gradient_sums, rows_of_chunk
from ..recorded import BESIDES
from . import programs

BUDGET = 5 << 28
"""Most bytes of logits in one of several chunks: 4352 tokens of 151,936 words, or 20,736 of 32,000, in half precision.

The logits of 8192 tokens of 151,936 words take 2.5 GB in half precision, and eager PyTorch has them in float32 more
than twice as well. A chunk costs a pass that reads and writes the weight's gradient in float32. On an H200, these
tokens, of 2048 elements, take 24.7 ms forward and backward in one chunk, and 26.9 ms in three, with a gigabyte.
"""

KEPT = 0.5
"""The share of `BUDGET` up to which logits are kept for the backward, because their gradient takes as much memory.

With kept logits, nothing is scaled. On an H200, 2048 tokens of 128,256 words and 4096 elements then take 9.8 ms, and
otherwise 10.6.
"""

_ROW = 64
"""Rows have a multiple of this many elements: 128 bytes of a half type, so that each row begins where a load may."""

_TILE = 1 << 14
"""Bytes of a tile of logits: one load of 16 bytes for each of 1024 threads.

At most two such programs fit a multiprocessor, or one if a thread takes more than 32 registers. So for 151,936 words in
half precision, an H100 works on 40 or 80 MB of rows at once, and its L2 of 50 MB still has a part of them when they are
read again.
"""

_LOAD = 16

_SCALED = 1 << 12
"""Elements of a gradient that a program scales: 16 for each thread of 8 warps, two loads of a half type."""

_INPUTS = "Tensor hidden, Tensor weight, Tensor labels, Tensor? bias"
_TERMS = "int ignore_index, float picked, float spread, float inner, float outer, bool capped"


def _numbers(hidden: Tensor) -> Tensor:
    """Memory for one number of each token."""
    return hidden.new_empty(hidden.shape[:1], dtype=torch.float32)


def _gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> list[Tensor]:
    return gradient_sums(hidden, weight, bias, wanted, _rows(hidden, weight, of_weight=wanted[1]))


def _measure_results(hidden: Tensor, weight: Tensor, *arguments: Any) -> list[Tensor]:
    asked, keep = arguments[-2:]
    numbers = [_numbers(hidden) for _ in range(2 + sum(asked))]
    return [*numbers, _logits(hidden, weight, hidden.shape[0])] if keep else numbers


@operation(
    f"fuseplug_linear_cross_entropy::measure({_INPUTS}, {_TERMS}, bool[{len(BESIDES)}] asked, bool keep) -> Tensor[]",
    _measure_results,
)
def measure(
    results: list[Tensor],
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    picked: float,
    spread: float,
    inner: float,
    outer: float,
    capped: bool,
    asked: Sequence[bool],
    keep: bool,
) -> None:
    """The value of each token, those of `BESIDES` that are *asked* for, and lse, each ``(tokens,)`` in float32.

    With *keep*, the logits follow, in the layout of `_logits`.
    """
    value, *rest = results
    buffer = rest.pop() if keep else _logits(hidden, weight, _rows(hidden, weight))
    lse = rest.pop()
    numbers = iter(rest)
    mean, *statistics = [next(numbers) if is_asked else None for is_asked in asked]
    # Each but logsumexp has its own sum in each lane. Only half as many threads have the registers for several sums.
    sums = sum(is_asked for name, is_asked in zip(BESIDES, asked, strict=True) if name != "logsumexp")
    sizes, constants = _layout(hidden, weight, 2 if sums > 1 else 1)
    for at, logits in chunks(hidden, weight, bias, buffer):
        programs.measure[(len(logits),)](
            logits,
            labels[at],
            value[at],
            lse[at],
            *(None if numbers is None else numbers[at] for numbers in (mean, *statistics)),
            *sizes,
            ignore_index,
            picked,
            spread,
            inner,
            outer,
            capped,
            mean is not None or spread != 0.0,
            **constants,
        )


def _differentiate_results(
    hidden: Tensor, weight: Tensor, _labels: Tensor, bias: Tensor | None, *arguments: Sequence[bool]
) -> list[Tensor]:
    return _gradients(hidden, weight, bias, arguments[-1])


@operation(
    f"fuseplug_linear_cross_entropy::differentiate({_INPUTS}, Tensor upstream, Tensor? of_entropy, "
    f"Tensor? entropy, Tensor? of_mean, Tensor? of_p, Tensor? of_square, Tensor lse, Tensor? kept, {_TERMS}, "
    "bool[3] wanted) -> Tensor[]",
    _differentiate_results,
)
def differentiate(
    results: list[Tensor],
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
    lse: Tensor,
    kept: Tensor | None,
    *arguments: Any,
) -> None:
    """The wanted gradients of hidden, weight and bias, in the memory of `gradient_sums`.

    *entropy*, *lse* and *kept* are results of `measure`.
    """
    *terms, wanted = arguments
    gradients = Gradients(results, wanted, hidden, weight)
    rows = len(hidden) if kept is not None else _rows(hidden, weight, of_weight=wanted[1])
    buffer = _logits(hidden, weight, rows)
    everything = slice(0, len(hidden)), buffer[:, : len(weight)]
    sizes, constants = _layout(hidden, weight)
    for at, of_logits in chunks(hidden, weight, bias, buffer) if kept is None else [everything]:
        programs.differentiate[(len(of_logits),)](
            of_logits if kept is None else kept,
            of_logits,
            labels[at],
            lse[at],
            None if entropy is None else entropy[at],
            upstream[at],
            None if of_entropy is None else of_entropy[at],
            None if of_mean is None else of_mean[at],
            None if of_p is None else of_p[at],
            None if of_square is None else of_square[at],
            upstream.stride(0),
            0 if of_entropy is None else of_entropy.stride(0),
            0 if of_mean is None else of_mean.stride(0),
            *sizes,
            *terms,
            **constants,
        )
        gradients.add(at, of_logits)


def _both_results(
    hidden: Tensor, weight: Tensor, _labels: Tensor, bias: Tensor | None, *arguments: Sequence[bool]
) -> list[Tensor]:
    return [_numbers(hidden), *_gradients(hidden, weight, bias, arguments[-1])]


@operation(
    f"fuseplug_linear_cross_entropy::measure_and_differentiate({_INPUTS}, Tensor upstream, {_TERMS}, bool[3] wanted) "
    "-> Tensor[]",
    _both_results,
)
def measure_and_differentiate(
    results: list[Tensor],
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    upstream: Tensor,
    ignore_index: int,
    picked: float,
    spread: float,
    inner: float,
    outer: float,
    capped: bool,
    wanted: Sequence[bool],
) -> None:
    """The value of each token, then the *wanted* gradients, for an *upstream* that is known beforehand.

    The gradients are in the memory of `gradient_sums`.
    """
    gradients = Gradients(results[1:], wanted, hidden, weight)
    buffer = _logits(hidden, weight, _rows(hidden, weight, of_weight=wanted[1]))
    sizes, constants = _layout(hidden, weight)
    for at, logits in chunks(hidden, weight, bias, buffer):
        programs.measure_and_differentiate[(len(logits),)](
            logits,
            labels[at],
            results[0][at],
            upstream[at],
            upstream.stride(0),
            *sizes,
            ignore_index,
            picked,
            spread,
            inner,
            outer,
            capped,
            spread != 0.0,
            **constants,
        )
        gradients.add(at, logits)


def _scaled(gradient: Tensor, _factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


@operation("fuseplug_linear_cross_entropy::scale(Tensor gradient, Tensor factor, ScalarType dtype) -> Tensor", _scaled)
def scale(result: Tensor, gradient: Tensor, factor: Tensor, _dtype: torch.dtype) -> None:
    """The contiguous *gradient* times *factor*, one number on the device, in *dtype*, rounded once."""
    # Not torch.mul, which moves single elements for a tensor in half precision times a number in float32.
    size = gradient.numel()
    programs.scale[(triton.cdiv(size, _SCALED),)](gradient, factor, result, size, BLOCK=_SCALED, num_warps=8)


def keeps(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the logits are kept, as `KEPT` says. Without a gradient of *weight* there is nothing to gain."""
    return weight.requires_grad and hidden.shape[0] * _stride(weight) * hidden.element_size() <= KEPT * BUDGET


def _logits(hidden: Tensor, weight: Tensor, rows: int) -> Tensor:
    """Memory for the logits of *rows* tokens, or of all tokens if there are fewer: ``(rows, _stride(weight))``."""
    return hidden.new_empty((min(rows, hidden.shape[0]), _stride(weight)))


def _stride(weight: Tensor) -> int:
    """How far apart rows of logits lie in memory."""
    return -(-weight.shape[0] // _ROW) * _ROW


def _layout(hidden: Tensor, weight: Tensor, share: int = 1) -> tuple[tuple[int, int], dict[str, int]]:
    """Width and stride of rows of logits, and the compile-time constants, for a tile of ``_TILE // share`` bytes."""
    stride, itemsize = _stride(weight), hidden.element_size()
    return (len(weight), stride), _constants(stride * itemsize, itemsize, _TILE // share)


def _rows(hidden: Tensor, weight: Tensor, of_weight: bool = False) -> int:
    row_bytes = _stride(weight) * hidden.element_size()
    return rows_of_chunk(hidden.shape[0], row_bytes, BUDGET, weight if of_weight else None)


@functools.lru_cache(maxsize=64)
def _constants(row_bytes: int, itemsize: int, most: int) -> dict[str, int]:
    """The compile-time constants: the size of the tile, of no more than *most* bytes, and its warps."""
    tile = min(most, 1 << (row_bytes - 1).bit_length())
    return {"BLOCK": tile // itemsize, "num_warps": max(1, tile // (32 * _LOAD))}
