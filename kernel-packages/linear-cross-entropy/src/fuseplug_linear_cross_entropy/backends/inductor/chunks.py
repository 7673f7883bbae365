"""Computes values and gradients from hidden states, with the logits of a block of tokens at a time, in one buffer."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fuseplug_backends.inductor import standard_state

from ...reference import Step
from ..chunks import Gradients, chunks, gradient_sums
from .programs import Coefficients, Values, factors_of, into_gradient, statistics

_BYTES = 160 << 20
_BYTES_FOR_WEIGHT = 640 << 20
"""Most bytes of logits in memory at a time; the second if the gradient of the weight is wanted.

That gradient is then usually one matmul, as for 2048 tokens of 151,936 words in bfloat16. The sum of several matmuls
needs float32, which takes four bytes for each element of the weight.
"""


class Head(NamedTuple):
    """A linear layer, its input, the labels, and the steps on its output; see `reference.compute`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    steps: tuple[Step, ...]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensors that may have a gradient."""
        return self[:3]


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


def values_of(head: Head) -> Values:
    """The `Values` of each token. There must be tokens and words, and each label must be a word."""
    return _sweep(head, Needs(hidden=False, weight=False, bias=False), coefficients=None, values=None)[0]


def differentiated(
    head: Head, coefficients: Coefficients, needs: Needs, values: Values | None = None
) -> tuple[Values, tuple[Tensor | None, ...]]:
    """The `Values` of each token, and the gradients of a sum of them; ``None`` for a gradient that is not wanted.

    Args:
        head: As for `values_of`.
        coefficients: The factors of the values in the sum.
        needs: Which gradients are wanted: at least one.
        values: The values, if they are known.
    """
    return _sweep(head, needs, coefficients=coefficients, values=values)


def _sweep(
    head: Head, needs: Needs, *, coefficients: Coefficients | None, values: Values | None
) -> tuple[Values, tuple[Tensor | None, ...]]:
    hidden, weight = head.hidden.detach(), head.weight.detach()
    bias = None if head.bias is None else head.bias.detach()
    by_block: list[Values] = []
    # Tensors that are made here are ordinary ones, in inference mode, too.
    with torch.inference_mode(mode=False), standard_state("cpu"):
        factors, columns = factors_of(head.steps), head.labels.clone()
        blocks = _blocks(len(hidden), len(weight) * hidden.element_size(), needs)
        buffer = hidden.new_empty(blocks[0].stop, len(weight))
        sums = gradient_sums(hidden, weight, bias, needs, blocks[0].stop)
        gradients = Gradients(sums, needs, hidden, weight)
        for block, z in chunks(hidden, weight, bias, buffer, blocks):
            labels = columns[block]
            of_block = statistics(z, labels, factors) if values is None else Values(*(v[block] for v in values))
            by_block.append(of_block)
            if coefficients is None:
                continue
            into_gradient(z, labels, of_block, Coefficients(*(c[block] for c in coefficients)), factors)
            gradients.add(block, z)
        del buffer, z
        values = values or Values(*map(torch.cat, zip(*by_block, strict=True)))
        rounded = (total.to(hidden.dtype) for total in sums)
        return values, tuple(next(rounded) if need else None for need in needs)


def _blocks(tokens: int, row_bytes: int, needs: Needs) -> list[slice]:
    """Blocks of rows whose logits fit into the budget; sizes differ by one at most, and are two or more if possible."""
    most = max(2, (_BYTES_FOR_WEIGHT if needs.weight else _BYTES) // row_bytes)
    number = max(1, min(-(-tokens // most), tokens // 2))
    size, larger = divmod(tokens, number)
    ends = [size * at + min(at, larger) for at in range(number + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]
