"""Small modules and inputs that tell the gated MLPs apart, and larger ones that show how exact a kernel is."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuseplug import Example

_FOR_NUMBERS = 1 << 8
"""From this size on, an example serves to judge numbers. It draws nothing at random while it runs, because the truth
may be computed on another device, which draws other numbers."""

_FOR_WIDTHS = 1 << 12
"""From this size on, an example has the module's own intermediate width, so that its programs serve the module."""

_LARGE_GATE = 1 << 21
"""Elements of the gate from that size on: enough for every path of a kernel, if they take at most `_MOST_ROWS` rows."""

_MOST_ROWS = 1 << 17
_WIDEST_HIDDEN = 8
_WIDEST_SQUARE = 256
_SMALL_INNER, _SMALL_OUTER = 10, (12, 14)
_MAGNITUDES = (1.0, 8.0, 0.25, 3.0, 0.0)
_OTHER_NUMBERS = (0.375, 0.5625, 0.6875, 0.8125)
"""Other values for the numbers that a module holds. Each may be a share, a limit or a factor."""


class MlpMix(NamedTuple):
    """One combination to check: the dtypes of x and of *down*'s weight, and whether the module has other numbers."""

    x: torch.dtype
    down: torch.dtype
    other_numbers: bool = False


class Projection(NamedTuple):
    """A linear child, by name."""

    name: str
    width_in: int
    width_out: int
    bias: bool
    down: bool


@dataclass(frozen=True)
class MlpParts:
    """The parts of a module that examples are made from.

    Attributes:
        hidden: Width of the input.
        inner: Width of the gate.
        in_one: Whether one projection gives gate and up.
        projections: The linear children.
        drops: Names of dropout children.
        norms: Names and widths of norm children.
        scales: Names of parameters of one element.
        numbers: Names of the numbers that the module holds.
        drops_by_number: Whether one of *numbers* may be a probability of dropout.
        widths: Names and values of the widths that the module holds.
    """

    hidden: int
    inner: int
    in_one: bool
    projections: tuple[Projection, ...]
    drops: tuple[str, ...]
    norms: tuple[tuple[str, int], ...]
    scales: tuple[str, ...]
    numbers: tuple[str, ...]
    drops_by_number: bool
    widths: tuple[tuple[str, int], ...]


class DrawingLinear(nn.Linear):
    """Draws random numbers in training, as LoRA's dropout does, so that the order of calls shows."""

    def forward(self, x: Tensor) -> Tensor:
        """Project, and apply dropout."""
        return functional.dropout(super().forward(x), 0.25, self.training)


def longest_sum(parts: MlpParts) -> int:
    """The most terms of a sum in an example: over the intermediate width, or over the rows for a weight."""
    return max(parts.inner, min(_MOST_ROWS, math.ceil(_LARGE_GATE / parts.inner)))


def make_example(parts: MlpParts, mix: MlpMix, size: int, generator: torch.Generator) -> Example:
    """Make plain linear layers in place of the projections, and rows of several magnitudes.

    Rows are large enough to reach a limit, or small enough to tell activations apart near zero, and some are zero.

    Returns:
        x ``(2, tokens, hidden)`` in the dtype of x, where *hidden* is that of the example; the projections, *down* in
        its own dtype and the others in that of x; scales ``(1,)``.
    """
    width = _widths(parts, size)
    draws = size < _FOR_NUMBERS
    children: dict[str, nn.Module] = {
        p.name: _linear(p, width, mix.down if p.down else mix.x, DrawingLinear if draws else nn.Linear, generator)
        for p in parts.projections
    }
    children |= {name: nn.Dropout(0.25 if draws else 0.0) for name in parts.drops}
    children |= {name: _norm(width[of], mix.x, generator) for name, of in parts.norms}
    scales = {name: 1 + _normal((1,), mix.x, generator).abs() for name in parts.scales}
    attributes: dict[str, float] = {name: width[value] for name, value in parts.widths}
    if mix.other_numbers:
        attributes |= dict(zip(parts.numbers, itertools.cycle(_OTHER_NUMBERS), strict=False))
    if parts.drops_by_number and not draws:
        attributes |= dict.fromkeys(parts.numbers, 0.0)
    hidden = width[parts.hidden]
    elements = _LARGE_GATE if size >= _FOR_WIDTHS else 0
    tokens = max(3, math.ceil(size / hidden / 2), min(_MOST_ROWS, math.ceil(elements / width[parts.inner])) // 2)
    scale = torch.tensor(_MAGNITUDES, device="cpu").repeat(math.ceil(2 * tokens / len(_MAGNITUDES)))[: 2 * tokens]
    x = torch.randn(2, tokens, hidden, generator=generator, dtype=torch.float32, device="cpu")
    return Example(((x * scale.view(2, tokens, 1)).to(mix.x),), scales, children, attributes)


def _widths(parts: MlpParts, size: int) -> dict[int, int]:
    """Each width of the module, with its width in the example; equal widths stay equal, as they may be the same."""
    outer = (parts.hidden, *(p.width_out for p in parts.projections if p.down))
    inner = (parts.inner, 2 * parts.inner) if parts.in_one else (parts.inner,)
    if size < _FOR_WIDTHS:
        here, narrow = _SMALL_INNER, _SMALL_OUTER
    else:
        here = parts.inner if set(inner).isdisjoint(outer) else min(parts.inner, _WIDEST_SQUARE)
        narrow = (_WIDEST_HIDDEN, _WIDEST_HIDDEN)
    widths = {width: width // parts.inner * here for width in inner}
    for width, here in zip(outer, narrow, strict=False):
        widths.setdefault(width, here)
    return widths


def _linear(
    projection: Projection,
    width: dict[int, int],
    dtype: torch.dtype,
    cls: type[nn.Linear],
    generator: torch.Generator,
) -> nn.Linear:
    width_in, width_out = width[projection.width_in], width[projection.width_out]
    linear = cls(width_in, width_out, bias=projection.bias, device="meta")
    linear.weight = nn.Parameter(_normal((width_out, width_in), dtype, generator, width_in**-0.5))
    if projection.bias:
        linear.bias = nn.Parameter(_normal((width_out,), dtype, generator))
    return linear


def _norm(width: int, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    norm = nn.LayerNorm(width, device="meta")
    norm.weight = nn.Parameter(_normal((width,), dtype, generator))
    norm.bias = nn.Parameter(_normal((width,), dtype, generator))
    return norm


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")).to(dtype)
