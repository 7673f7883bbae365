"""The examples that an RMSNorm is tried on: combinations of dtypes, and rows that tell the variants apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fuseplug import Example
from fuseplug_backends.dtypes import MODEL_DTYPES

from .parts import NormParts

_MIXED = (
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
)


class NormMix(NamedTuple):
    """One combination to check: the dtypes of x (and of the gate) and of the weight, and whether a gate is given."""

    x: torch.dtype
    weight: torch.dtype
    gate: bool = False


def mixes_of(weight: Tensor | None, parts: NormParts) -> Iterator[NormMix]:
    """Every combination to check; the first has the dtype of *weight*, the norm's own."""
    pairs = [(dtype, dtype) for dtype in MODEL_DTYPES]
    if weight is not None:
        pairs = [*sorted(pairs, key=lambda pair: pair[1] is not weight.dtype), *_MIXED]
    for x, w in pairs:
        yield NormMix(x, w, parts.gate != "none")
    if parts.gate == "optional":
        yield NormMix(*pairs[0], gate=False)


def example_of(parts: NormParts, eps: float, mix: NormMix, size: int, generator: torch.Generator) -> Example:
    """Make rows of several magnitudes: where eps does not matter, where only eps matters, and where squares are large.

    Returns:
        x, and the gate if *mix* has one, ``(2, tokens, width)`` in the dtype of x; the weight ``(width,)``, or
        ``()`` for a single number, in its own dtype.
    """
    near_eps = math.sqrt(eps) or 1e-3
    magnitudes = [1.0, near_eps, 16.0, 0.25 * near_eps, 1.0, 0.0 if eps > 0 else 4.0]
    tokens = max(3, math.ceil(size / parts.width / 2))
    scale = torch.tensor(magnitudes, device="cpu").repeat(math.ceil(2 * tokens / len(magnitudes)))[: 2 * tokens]

    def normal() -> Tensor:
        return torch.randn(2, tokens, parts.width, generator=generator, dtype=torch.float32, device="cpu")

    x = (normal() * scale.view(2, tokens, 1)).to(mix.x)
    gate = (normal().to(mix.x),) if mix.gate else ()
    if parts.weight is None:
        return Example((x, *gate))
    if parts.single:
        weight = 1.0 + 0.3 * torch.randn((), generator=generator, dtype=torch.float32, device="cpu")
        return Example((x, *gate), {parts.weight: weight.to(mix.weight)})
    # Alternately around 1 and around 0: there w and 1 + w can be told apart, and so can their roundings.
    weight = 0.3 * torch.randn(parts.width, generator=generator, dtype=torch.float32, device="cpu")
    weight[::2] += 1.0
    return Example((x, *gate), {parts.weight: weight.to(mix.weight)})
