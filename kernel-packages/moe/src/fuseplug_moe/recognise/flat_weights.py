"""Experts whose three projections lie below each other: matrices of (experts · inner, hidden), in a child."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug import Adapter, Compute, Example, Proposal, Rejection

from . import gates
from .listed_blocks import is_the_originals
from .mixes import DTYPES, ExpertsMix, mixes_of_modules
from .small_copies import SmallCopies
from .stacked_experts import OWN, PLAIN, inexact, named_or_own, own_product, routing
from .under_autocast import narrowed


@dataclass(frozen=True)
class Sizes:
    """The names of the numbers that the holder of the matrices has."""

    experts: str
    inner: str
    hidden: str

    def of(self, holder: nn.Module) -> tuple[int, int, int]:
        """These numbers."""
        return getattr(holder, self.experts), getattr(holder, self.inner), getattr(holder, self.hidden)


@dataclass(frozen=True)
class FlatAdapter(Adapter):
    """Calls the experts with views of the matrices of a child.

    Attributes:
        variant: The gate.
        holder: The child.
        sizes: The names of its sizes.
        gate: Its gate projection.
        up: Its up projection.
        down: Its down projection.
        activation: A key of `fuseplug_moe.reference.GATES`, or `OWN`.
        index: Which argument after the rows has the experts of each.
        weights: Which has their weights.
    """

    variant: str
    holder: str
    sizes: Sizes
    gate: str
    up: str
    down: str
    activation: str
    index: int
    weights: int

    @property
    def reads(self) -> tuple[str, ...]:
        """The matrices and the sizes."""
        names = (self.gate, self.up, self.down, self.sizes.experts, self.sizes.inner, self.sizes.hidden)
        return tuple(f"{self.holder}.{name}" for name in names)

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states, *routing)``, in the order of the module.

        ``hidden_states`` is ``(..., hidden)``, floating; among *routing* are indices and weights ``(tokens, k)``. The
        result has the shape and dtype of ``hidden_states``. Errors are those of `reference.moe`.
        """
        how = self

        def forward(module: nn.Module, hidden_states: Tensor, *routed: Tensor) -> Any:
            holder: Any = module._modules[how.holder]
            matrices = [holder._parameters[name] for name in (how.gate, how.up, how.down)]
            if is_the_originals(hidden_states) or any(type(matrix) not in PLAIN for matrix in matrices):
                return NotImplemented
            experts, inner, hidden = how.sizes.of(holder)
            gate, up, down = (narrowed(hidden_states, matrix).view(experts, inner, hidden) for matrix in matrices)
            y = compute(
                hidden_states.reshape(-1, hidden),
                routed[how.index],
                routed[how.weights],
                gate,
                down.transpose(1, 2),
                up=up,
                activation=own_product(holder, "concatenated") if how.activation == OWN else how.activation,
            )
            return y.view(hidden_states.shape)

        return forward


def match(module: nn.Module) -> list[Proposal] | Rejection | None:
    """Propose for *module* if a child holds the matrices of all its experts."""
    if is_holder(module):
        return Rejection("it holds the weights of experts, one below the other; what is fused is the module around it")
    held = [name for name, child in module._modules.items() if child is not None and is_holder(child)]
    if len(held) != 1:
        return None
    holder: Any = module._modules[held[0]]
    names, sizes = list(holder._parameters), _sizes(holder)
    places = _places(type(module).forward)
    activation = gates.activation_of(holder)
    if sizes is None or places is None or activation is None:
        return Rejection(
            f"its forward takes {inspect.signature(type(module).forward)}; known is (hidden states, indices, weights) "
            "around experts with an activation and numbers that say how many they are and how wide"
        )
    dtype = holder._parameters[names[0]].dtype
    if dtype not in DTYPES:
        return Rejection(f"its experts are {dtype}; supported are float32, bfloat16 and float16")
    adapters = [
        FlatAdapter(f"{each} flat", held[0], sizes, gate, up, down, each, *places)
        for gate, up, down in itertools.permutations(names)
        for each in named_or_own(activation)
    ]
    return [inexact(adapters, functools.partial(_example, module, adapters[0]), mixes_of_modules(dtype), held)]


def is_holder(module: nn.Module) -> bool:
    """Whether *module* holds three matrices of one shape, whose rows are those of several experts."""
    shapes = {None if p is None or p.dim() != 2 else tuple(p.shape) for p in module._parameters.values()}
    return len(module._parameters) == 3 and len(shapes) == 1 and None not in shapes and _sizes(module) is not None


def _sizes(holder: nn.Module) -> Sizes | None:
    rows, hidden = next(iter(holder._parameters.values())).shape  # type: ignore[union-attr]
    numbers = {name: value for name, value in vars(holder).items() if type(value) is int}
    many = [name for name in numbers if "expert" in name]
    wide = [name for name, value in numbers.items() if value == hidden and name not in many]
    found = (
        Sizes(experts, inner, wide[0])
        for experts in (many if wide else ())
        for inner, value in numbers.items()
        if inner not in (experts, wide[0]) and value * numbers[experts] == rows
    )
    return next(found, None)


def _places(forward: Callable[..., Any]) -> tuple[int, int] | None:
    """Which arguments after the rows are the indices and the weights of those; ``None`` for another signature."""
    parameters = list(inspect.signature(forward).parameters)[2:]
    index = [i for i, name in enumerate(parameters) if "weight" not in name and ("expert" in name or "ind" in name)]
    weights = [i for i, name in enumerate(parameters) if "weight" in name]
    chosen = [i for i in weights if "top" in parameters[i]] or weights
    return (index[0], chosen[0]) if len(index) == 1 and len(chosen) == 1 else None


def _example(module: nn.Module, likely: FlatAdapter, mix: ExpertsMix, size: int, generator: torch.Generator) -> Example:
    """A few experts, one of them idle.

    Returns:
        x ``(2, tokens / 2, hidden)`` in the dtype of the rows; indices and weights ``(tokens, 2)``, the weights in the
        router's dtype; and the child that holds the matrices.
    """
    holder: Any = module._modules[likely.holder]
    real, inner, hidden = likely.sizes.of(holder)
    experts, large = min(5, real), size > 1 << 12
    known = {inner: 136 if large else 7, hidden: 128 if large else 12, real: experts}
    small = SmallCopies(known | {real * inner: known[real] * known[inner]}, generator)
    tokens = max(6, size // known[hidden]) // 2 * 2
    x = small.normal(2, tokens // 2, known[hidden]).to(mix.x)
    index, weights = routing(tokens, known[real], generator)
    arguments = dict(_others(type(module).forward, tokens, known[real], mix.router))
    arguments |= {likely.index: index, likely.weights: weights.to(mix.router)}
    return Example(
        (x, *(arguments[place] for place in sorted(arguments))),
        children={likely.holder: small.module(holder, mix.experts)},
        attributes=small.attributes(module),
    )


def _others(forward: Callable[..., Any], tokens: int, experts: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """For every argument after the rows a weight of every expert, which is what else a router gives."""
    for place in range(len(inspect.signature(forward).parameters) - 2):
        yield place, torch.zeros(tokens, experts, dtype=dtype, device="cpu")
