"""Experts that lie one below the other in three matrices (experts · inner, hidden), which a child holds."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug import Adapter, Compute, Example, Proposal, Rejection
from fuseplug_backends.dtypes import MODEL_DTYPES

from . import gates
from .calls import PLAIN, is_the_originals, narrowed
from .example_rows import routing
from .gates import named_or_own, to_call
from .mixes import ExpertsMix, mixes_of_modules
from .proposals import inexact
from .small_copies import SmallCopies


@dataclass(frozen=True)
class FlatAdapter(Adapter):
    """Calls the experts with views of the matrices of a child.

    Attributes:
        variant: The gate.
        holder: The child.
        sizes: The names of the child's numbers: of experts, the inner size of one, and the hidden size.
        gate: The child's gate projection.
        up: Its up projection.
        down: Its down projection.
        activation: A key of `fuseplug_moe.reference.GATES`, or `OWN`.
        index: Which argument after the rows has the indices of each row's experts.
        weights: Which argument has their weights.
    """

    variant: str
    holder: str
    sizes: tuple[str, str, str]
    gate: str
    up: str
    down: str
    activation: str
    index: int
    weights: int

    @property
    def reads(self) -> tuple[str, ...]:
        """The matrices and the sizes."""
        return tuple(f"{self.holder}.{name}" for name in (self.gate, self.up, self.down, *self.sizes))

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states, *routing)``, in the module's order of arguments.

        ``hidden_states`` is ``(..., hidden)``, floating; among *routing* are indices and weights ``(tokens, k)``. The
        result has the shape and dtype of ``hidden_states``. Errors are those of `reference.moe`.
        """
        adapter, sizes_of = self, operator.attrgetter(*self.sizes)

        def forward(module: nn.Module, hidden_states: Tensor, *routed: Tensor) -> Any:
            holder: Any = module._modules[adapter.holder]
            matrices = [holder._parameters[name] for name in (adapter.gate, adapter.up, adapter.down)]
            if is_the_originals(hidden_states) or any(type(matrix) not in PLAIN for matrix in matrices):
                return NotImplemented
            experts, inner, hidden = sizes_of(holder)
            gate, up, down = (narrowed(hidden_states, matrix).view(experts, inner, hidden) for matrix in matrices)
            y = compute(
                hidden_states.reshape(-1, hidden),
                routed[adapter.index],
                routed[adapter.weights],
                gate,
                down.transpose(1, 2),
                up=up,
                activation=to_call(adapter.activation, holder, "concatenated"),
            )
            return y.view(hidden_states.shape)

        return forward


def match(module: nn.Module) -> list[Proposal] | Rejection | None:
    """Propose for *module* if a child holds the matrices of all its experts."""
    if is_holder(module):
        return Rejection("it holds the weights of experts, one below the other; Fuseplug fuses the module around it")
    holders = [name for name, child in module._modules.items() if child is not None and is_holder(child)]
    if len(holders) != 1:
        return None
    holder: Any = module._modules[holders[0]]
    names, sizes = list(holder._parameters), _sizes(holder)
    places = _places(type(module).forward)
    activation = gates.activation_of(holder)
    if sizes is None or places is None or activation is None:
        return Rejection(
            f"its forward takes {inspect.signature(type(module).forward)}; known is (hidden states, indices, weights) "
            "around experts with an activation and numbers that say how many they are and how wide"
        )
    dtype = holder._parameters[names[0]].dtype
    if dtype not in MODEL_DTYPES:
        return Rejection(f"its experts are {dtype}; supported are float32, bfloat16 and float16")
    adapters = [
        FlatAdapter(f"{name} flat", holders[0], sizes, gate, up, down, name, *places)
        for gate, up, down in itertools.permutations(names)
        for name in named_or_own(activation)
    ]
    example = functools.partial(_example, module, adapters[0])
    return [inexact(adapters, example, mixes_of_modules(dtype), covers=tuple(holders))]


def is_holder(module: nn.Module) -> bool:
    """Whether *module* holds three matrices of one shape, whose rows are those of several experts."""
    shapes = {None if p is None or p.dim() != 2 else tuple(p.shape) for p in module._parameters.values()}
    return len(module._parameters) == 3 and len(shapes) == 1 and None not in shapes and _sizes(module) is not None


def _sizes(holder: nn.Module) -> tuple[str, str, str] | None:
    """The `FlatAdapter.sizes` of *holder*; ``None`` if no attributes fit its matrices."""
    rows, hidden = next(iter(holder._parameters.values())).shape  # type: ignore[union-attr]
    numbers = {name: value for name, value in vars(holder).items() if type(value) is int}
    many = [name for name in numbers if "expert" in name]
    wide = [name for name, value in numbers.items() if value == hidden and name not in many]
    possible = (
        (experts, inner, wide[0])
        for experts in (many if wide else ())
        for inner, value in numbers.items()
        if inner not in (experts, wide[0]) and value * numbers[experts] == rows
    )
    return next(possible, None)


def _places(forward: Callable[..., Any]) -> tuple[int, int] | None:
    """Which arguments after the rows are the indices and their weights; ``None`` for another signature."""
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
    real, inner, hidden = operator.attrgetter(*likely.sizes)(holder)
    experts, large = min(5, real), size > 1 << 12
    sizes = {inner: 136 if large else 7, hidden: 128 if large else 12, real: experts}
    small = SmallCopies(sizes | {real * inner: sizes[real] * sizes[inner]}, generator)
    tokens = max(6, size // sizes[hidden]) // 2 * 2
    x = small.normal(2, tokens // 2, sizes[hidden]).to(mix.x)
    index, weights = routing(tokens, sizes[real], generator)
    # Any other argument from a router is a weight for every expert.
    other = torch.zeros(tokens, sizes[real], dtype=mix.router, device="cpu")
    arguments = dict.fromkeys(range(len(inspect.signature(type(module).forward).parameters) - 2), other)
    arguments |= {likely.index: index, likely.weights: weights.to(mix.router)}
    return Example(
        (x, *(arguments[place] for place in sorted(arguments))),
        children={likely.holder: small.module(holder, mix.experts)},
        attributes=small.attributes(module),
    )
