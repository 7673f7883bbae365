"""Sparse blocks with stacked experts whose router is called as it is, for the block and the experts share its work."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseplug import Adapter, Compute, Example, Proposal, Rejection

from ..reference import GateUpLayout
from . import example_rows, gates
from .listed_blocks import is_the_originals, linears_of, takes, top_k_of
from .mixes import DTYPES, ExpertsMix, mixes_of_modules
from .small_copies import SmallCopies
from .stacked_experts import OWN, PLAIN, inexact, named_or_own, own_product, shapes_read
from .under_autocast import narrowed


class Routed(NamedTuple):
    """What a router says.

    Attributes:
        x: ``(rows, hidden)``, what the experts are given.
        chosen: ``(rows, k)``, integers, the experts of each.
        weights: ``(rows, k)``, floating, what their results are weighted with.
        logits: ``(tokens, experts)``, what the block returns beside the result.
    """

    x: Tensor
    chosen: Tensor
    weights: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Sorted:
    """A router that sorts the slots by expert: gives their order, token and weight, and how many each expert has."""

    label = "sorted"

    def read(self, x: Tensor, returned: Any, top_k: int) -> Routed:
        """Undo the sorting; *x* is ``(tokens, hidden)``, and the router's slots and weights are ``(tokens · k,)``."""
        slots, _, weights, sizes, logits = returned
        share = torch.as_tensor(sizes, device=slots.device)
        experts = torch.repeat_interleave(share, output_size=len(slots))
        index = torch.empty_like(slots).index_copy(0, slots, experts)
        weights = torch.zeros_like(weights).index_copy(0, slots, weights)
        return Routed(x, index.view(-1, top_k), weights.view(-1, top_k), logits)

    def total(self, y: Tensor, top_k: int) -> Tensor:
        """The result of each token ``(tokens, hidden)``, from *y*, those of its rows."""
        del top_k
        return y


@dataclass(frozen=True)
class Scored:
    """A router that scores all experts, zero where one is not chosen, which the *inputs* of the experts are scaled by.

    An expert without biases makes zero of zero, so those of score zero need not be computed.
    """

    label = "input-scaled"

    def read(self, x: Tensor, returned: Any, top_k: int) -> Routed:
        """Make a row of each choice; *x* is ``(tokens, hidden)``, and the router's scores are ``(tokens, experts)``."""
        scores, logits = returned
        chosen, index = scores.topk(top_k, dim=1)
        scaled = (x[:, None] * chosen[..., None]).flatten(0, 1)
        # What a batched product gives has the dtype of autocast, and so has what becomes of it.
        return Routed(narrowed(x, scaled), index.view(-1, 1), torch.ones_like(chosen).view(-1, 1), logits)

    def total(self, y: Tensor, top_k: int) -> Tensor:
        """The result of each token ``(tokens, hidden)``, from *y*, those of its rows."""
        return y if top_k == 1 else y.view(-1, top_k, y.shape[-1]).sum(1)


@dataclass(frozen=True)
class Stacks:
    """The experts of a block, by names.

    Attributes:
        gate_up: The child that holds the first projection, and its name there.
        down: Those of the second.
        transposed: Whether matrices are (in, out).
        activation: A key of `fuseplug_moe.reference.GATES`, or `OWN`.
        layout: As in `fuseplug_moe.reference.moe`.
        holder: The child that has the activation; ``None`` if the block itself has it.
    """

    gate_up: tuple[str, str]
    down: tuple[str, str]
    transposed: bool
    activation: str
    layout: GateUpLayout
    holder: str | None

    @property
    def children(self) -> tuple[str, ...]:
        """The children that are no longer called."""
        return tuple(dict.fromkeys((self.gate_up[0], self.down[0])))

    def weights(self, block: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Both projections; ``None`` if they are no plain tensors: then the module knows how to call them."""
        found = [block._modules[child]._parameters.get(name) for child, name in (self.gate_up, self.down)]  # type: ignore[union-attr]
        gate_up, down = found
        return (gate_up, down) if type(gate_up) in PLAIN and type(down) in PLAIN else None  # type: ignore[return-value]

    def gate(self, block: nn.Module) -> str | Callable[[Tensor], Tensor]:
        """The activation to compute with."""
        if self.activation != OWN:
            return self.activation
        return own_product(block if self.holder is None else getattr(block, self.holder), self.layout)


@dataclass(frozen=True)
class RoutedAdapter(Adapter):
    """The forward of a block that calls its router, and its experts' projections in one.

    Attributes:
        variant: The gate, how it routes and what else it adds.
        stacks: Where the experts are.
        router: The child that routes.
        top_k: The name of the number of experts that a token goes to, and the child that has it, or ``None``.
        answer: What the router says.
        shared: The expert that every token goes to.
        bias: The parameter that is added in the end.
        row_per_token: Whether the result has a row for each token, whatever the shape of the input.
        logits: Whether the logits are returned beside the result.
    """

    variant: str
    stacks: Stacks
    router: str
    top_k: tuple[str | None, str]
    answer: Sorted | Scored
    shared: str | None
    bias: str | None
    row_per_token: bool
    logits: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """The matrices, the bias, and how many experts a token goes to."""
        matrices = [".".join(cube) for cube in (self.stacks.gate_up, self.stacks.down)]
        top_k = ".".join(name for name in self.top_k if name is not None)
        return (*matrices, top_k, *([self.bias] if self.bias is not None else []))

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states)``.

        ``hidden_states`` is ``(..., hidden)``, of any floating dtype that the block takes. The result has its dtype,
        and its shape or ``(tokens, hidden)``; with *logits*, those come second. Errors are those of `reference.moe`.
        """
        how, stacks = self, self.stacks

        def forward(module: nn.Module, hidden_states: Tensor) -> Any:
            weights = stacks.weights(module)
            if weights is None or is_the_originals(hidden_states):
                return NotImplemented
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            holder, name = how.top_k
            top_k = operator.attrgetter(name if holder is None else f"{holder}.{name}")(module)
            routed = how.answer.read(x, getattr(module, how.router)(x), top_k)
            y = compute(
                routed.x,
                routed.chosen,
                routed.weights,
                *(narrowed(x, weight) for weight in weights),
                transposed=stacks.transposed,
                layout=stacks.layout,
                activation=stacks.gate(module),
            )
            y = how.answer.total(y, top_k)
            if how.shared is not None:
                y = getattr(module, how.shared)(x) + y
            if not how.row_per_token:
                y = y.view(hidden_states.shape)
            if how.bias is not None:
                y = y + getattr(module, how.bias)
            return (y, routed.logits) if how.logits else y

        return forward


def match(module: nn.Module) -> list[Proposal] | Rejection | None:
    """Propose for *module* if its experts are stacked in its children, and it has a router."""
    cubes = [
        (child, name)
        for child, held in module._modules.items()
        if held is not None and not any(True for _ in held.children() if any(True for _ in _.parameters()))
        for name, parameter in held._parameters.items()
        if parameter is not None and parameter.dim() == 3
    ]
    if len(cubes) != 2:
        return None
    apart = cubes[0][0] != cubes[1][0]
    shapes = {cube: tuple(module._modules[cube[0]]._parameters[cube[1]].shape) for cube in cubes}  # type: ignore[union-attr]
    first, second = sorted(cubes, key=lambda cube: any(word in ".".join(cube) for word in ("down", "out")))
    read = shapes_read(shapes[first], shapes[second])
    holder = None if apart else first[0]
    held: Any = module if holder is None else module._modules[holder]
    if read is None or (not apart and not takes(type(held).forward, 1)):
        return None
    activation = gates.activation_of(held)
    router = next(
        (
            name
            for name, child in module._modules.items()
            if child is not None
            and name not in (first[0], second[0])
            and example_rows.linear_of(child, shapes[first][0])
        ),
        None,
    )
    if activation is None or router is None or not takes(type(module).forward, 1):
        return None
    transposed, halves = read
    layout: GateUpLayout = "ungated" if halves == 1 else "concatenated"
    stacks = [Stacks(first, second, transposed, name, layout, holder) for name in named_or_own(activation)]
    return _propose(module, stacks, router, Sorted() if apart else Scored())


def _propose(
    module: nn.Module, stacks: list[Stacks], router: str, answer: Sorted | Scored
) -> list[Proposal] | Rejection:
    taken = {router, *stacks[0].children}
    others = [n for n, c in module._modules.items() if c is not None and n not in taken and _has_parameters(c)]
    shared = [name for name in others if len(linears_of(module._modules[name])) >= 2]
    biases = [name for name, parameter in module._parameters.items() if parameter is not None]
    if unknown := set(others).difference(shared):
        return Rejection(f"it has children {', '.join(sorted(unknown))} that no known sparse block has")
    if len(shared) > 1 or len(biases) > 1:
        return Rejection(f"it has {', '.join((*shared, *biases))}; known are one shared expert and one bias")
    top_k = next(
        (
            (holder, found)
            for holder, held in ((None, module), (router, module._modules[router]))
            if held is not None and (found := top_k_of(held)) is not None
        ),
        None,
    )
    if top_k is None:
        return Rejection("neither it nor its router has an attribute that says how many experts a token goes to")
    adapters = [
        RoutedAdapter(
            " ".join([each.activation, answer.label, *("shared" for _ in shared), *("biased" for _ in biases)]),
            each,
            router,
            top_k,
            answer,
            next(iter(shared), None),
            next(iter(biases), None),
            row_per_token,
            logits,
        )
        for each in stacks
        for logits in (True, False)
        for row_per_token in (False, True)
    ]
    holder, name = stacks[0].gate_up
    dtype = getattr(module._modules[holder], name).dtype
    if dtype not in DTYPES:
        return Rejection(f"its experts are {dtype}; supported are float32, bfloat16 and float16")
    alike = (each for each in mixes_of_modules(dtype) if each.x is each.router)
    return [inexact(adapters, functools.partial(_example, module, adapters[0]), alike, stacks[0].children)]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _example(
    module: nn.Module, likely: RoutedAdapter, mix: ExpertsMix, size: int, generator: torch.Generator
) -> Example:
    """Rows whose routing no rounding can decide, over a few experts, one of which no row is routed to.

    Returns:
        x ``(2, tokens / 2, hidden)`` in the dtype of the rows; all children; and the bias.
    """
    stacks = likely.stacks
    holder, name = stacks.down
    real, a, b = getattr(module._modules[holder], name).shape
    hidden, inner = (b, a) if stacks.transposed else (a, b)
    where, named = likely.top_k
    top_k = operator.attrgetter(named if where is None else f"{where}.{named}")(module)
    number = min(real, top_k + 3)
    large = size > 1 << 12
    known = {2 * inner: 272 if large else 16, inner: 136 if large else 8, hidden: 128 if large else 24}
    small = SmallCopies({**known, real: number}, generator)
    children = {n: small.module(child, mix.x) for n, child in module._modules.items() if child is not None}
    linear = example_rows.linear_of(children[likely.router], number)
    x = example_rows.decided(small, linear, top_k, max(6, size // small.size(hidden)), mix.x)
    bias = {} if likely.bias is None else {likely.bias: small.tensor(getattr(module, likely.bias), mix.x)}
    return Example((x,), bias, children, small.attributes(module))
