"""Examples for blocks with a list of experts: a few experts, one of them idle."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from fuseplug import Example

from ..blocks import linear_of
from ..example_rows import decided, routing
from ..mixes import ExpertsMix
from ..small_copies import SmallCopies
from .adapters import BlockAdapter, ListedExperts


def example_of_seam(
    module: nn.Module, listed: ListedExperts, mix: ExpertsMix, size: int, generator: torch.Generator
) -> Example:
    """At most five experts, one of them idle.

    Returns:
        x ``(tokens, hidden)`` in the dtype of the rows; indices and weights ``(tokens, 2)``, the weights in the
        router's dtype; and the experts.
    """
    small, hidden, few = _small_copies(module, listed, 5, size, generator)
    x = small.normal(max(6, size // hidden), hidden).to(mix.x)
    index, weights = routing(len(x), len(few), generator)
    return Example(
        (x, index, weights.to(mix.router)),
        children={listed.experts: nn.ModuleList([small.module(expert, mix.experts) for expert in few])},
        attributes=small.attributes(module),
    )


def _small_copies(
    block: nn.Module, listed: ListedExperts, most: int, size: int, generator: torch.Generator
) -> tuple[SmallCopies, int, list[nn.Module]]:
    """The maker of small copies, the small hidden size, and the experts to copy: at most *most*."""
    experts: Any = block._modules[listed.experts]
    number = min(most, len(experts))
    (hidden, inner), large = listed.sizes(block), size > 1 << 12
    sizes = {hidden: 128 if large else 12, inner: 272 if large else 7, len(experts): number}
    return SmallCopies(sizes, generator), sizes[hidden], [*experts[:number]]


def example_of_block(
    module: nn.Module, likely: BlockAdapter, mix: ExpertsMix, size: int, generator: torch.Generator
) -> Example:
    """Rows whose routing no rounding can decide, over a few experts, one of them idle.

    Returns:
        x ``(2, tokens / 2, hidden)`` in the dtype of the rows; and all children.
    """
    listed, way = likely.listed, likely.routing
    top_k = operator.attrgetter(way.top_k)(module)
    small, hidden, few = _small_copies(module, listed, top_k + 3, size, generator)
    children = {
        name: small.module(child, mix.router if name == way.router else mix.x)
        for name, child in module._modules.items()
        if child is not None and name != listed.experts
    }
    children[listed.experts] = nn.ModuleList([small.module(expert, mix.experts) for expert in few])
    correct = None if way.correction is None else children[way.correction]
    for bias in () if correct is None else correct.parameters():
        # Small beside a probability, so that the correction alone does not decide which experts are chosen.
        bias.data *= _CORRECTION
    linear = linear_of(children[way.router], len(few))
    x = decided(small, linear, top_k, max(6, size // hidden), mix.x, correct)
    return Example((x,), children=children, attributes=small.attributes(module))


_CORRECTION = 0.03
