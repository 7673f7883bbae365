"""Examples for stacked experts: a few experts, and rows that take their gates past the points where they bend."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fuseplug import Example

from .. import gates
from ..example_rows import routing
from ..gates import OWN
from ..indices import PARALLEL
from ..mixes import ExpertsMix
from ..small_copies import SmallCopies
from .adapters import StackedAdapter, StackedParts

_KINKED = ("relu", OWN)
"""Gates whose derivative jumps, or may jump: rounding must not decide on which side of the jump a number is."""

_FAR = 100.0
"""A limit that no example reaches."""

_CONSTANT = 4.0


def example_of(
    module: nn.Module, likely: StackedAdapter, mix: ExpertsMix, size: int, generator: torch.Generator
) -> Example:
    """A few experts, one of them idle, and rows that take their gates well past where they clamp.

    Returns:
        x ``(tokens, hidden)`` in the dtype of the rows, with a leading 1 if weights are dense; indices ``(tokens, 2)``;
        weights ``(tokens, 2)``, or ``(tokens, experts)`` if dense, in the router's dtype; and the parameters, in the
        dtype of the experts.
    """
    parts = likely.parts
    number, hidden, inner = sizes_of(module, parts)
    experts, large = min(number, 5), size > 1 << 12
    all_of_them = len(getattr(module, parts.gate_up)) if parts.passing else number
    every = experts + min(2, all_of_them - number)
    # Multiples of eight, because torch's grouped matmul requires rows that begin at multiples of 16 bytes.
    sizes = {number: experts, 2 * inner: 272 if large else 16, inner: 136 if large else 8, all_of_them: every}
    small = SmallCopies({hidden: 128 if large else 24, **sizes}, generator)
    h, i = small.size(hidden), small.size(inner)
    width = parts.halves * i
    tokens = max(6, size // h)
    limit = gates.scalar_named(module, "limit")
    bound = None if limit is None or getattr(module, limit) > _FAR else float(getattr(module, limit))
    x = small.normal(tokens, h)
    # The first column of x is constant, so its weights set the value around which a column of the projection lies.
    x[:, 0] = _CONSTANT
    kinked = likely.activation in _KINKED
    spread = 1.5 if bound is None and not kinked else 0.12 * (bound or 5.0)
    gate_up = small.normal(every, width, h, scale=spread * h**-0.5)
    gate, up = (
        [gate_up[:, ::2], gate_up[:, 1::2]] if likely.layout == "interleaved" else [gate_up[:, :i], gate_up[:, i:]]
    )
    if bound is not None:
        _put_around(gate, (1.7 * bound, 0.0, 0.0), generator)
        _put_around(up, (1.7 * bound, -1.7 * bound, 0.0, 0.0), generator)
    elif kinked:
        _put_around(gate, (3.4, -3.4), generator)
    parameters = {parts.gate_up: gate_up, parts.down: small.normal(experts, h, i, scale=i**-0.5)}
    if parts.transposed:
        parameters = {name: value.transpose(1, 2).contiguous() for name, value in parameters.items()}
    if parts.gate_up_bias is not None:
        parameters[parts.gate_up_bias] = small.normal(experts, width, scale=0.03 * (bound or 5.0))
    if parts.down_bias is not None:
        parameters[parts.down_bias] = small.normal(experts, h, scale=0.3)
    index, weights = routing(tokens, every, generator)
    if mix.elsewhere:
        index[::3, 0] = every
    weights = weights.to(mix.router)
    if parts.dense:
        chosen, here = index.clamp(max=experts - 1), weights.masked_fill(index >= experts, 0)
        weights = torch.zeros(tokens, experts, dtype=mix.router, device="cpu").scatter_add(1, chosen, here)
    x = x.to(mix.x)
    return Example(
        (x[None] if parts.dense else x, *((weights, index) if parts.weights_first else (index, weights))),
        {name: value.to(mix.experts) for name, value in parameters.items()},
        {} if parts.post is None else {parts.post: small.module(getattr(module, parts.post), mix.experts)},
        # A module that computes every expert may do so in eval mode only. Then kernels are called in training.
        {
            **small.attributes(module),
            **({"training": True} if parts.dense else {}),
            # Some implementations of experts handle experts elsewhere only if this flag says that there may be any.
            **({PARALLEL: True} if mix.elsewhere and PARALLEL in vars(module) else {}),
        },
    )


def _put_around(weight: Tensor, values: tuple[float, ...], generator: torch.Generator) -> None:
    chosen = torch.randint(len(values), weight.shape[:-1], generator=generator, device="cpu")
    weight[..., 0] = torch.tensor(values, dtype=torch.float32, device="cpu")[chosen] / _CONSTANT


def sizes_of(module: nn.Module, parts: StackedParts) -> tuple[int, int, int]:
    """The number of experts, their hidden size and their inner size."""
    number, a, b = getattr(module, parts.down).shape
    if parts.count is not None:
        number = getattr(module, parts.count)
    return (number, b, a) if parts.transposed else (number, a, b)
