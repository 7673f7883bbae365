"""Sparse blocks with stacked experts. Their router is called as it is: block and experts share its work."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseplug import Adapter, Compute, Example, Proposal, Rejection
from fuseplug_backends.dtypes import MODEL_DTYPES

from ..reference import GateUpLayout
from . import gates
from .blocks import has_parameters, linear_of, linears_of, router_of, shapes_read, takes, top_k_of
from .calls import PLAIN, is_the_originals, narrowed
from .example_rows import decided
from .gates import named_or_own, to_call
from .mixes import ExpertsMix, mixes_of_modules
from .proposals import inexact
from .small_copies import SmallCopies


class Routed(NamedTuple):
    """The answer of a router.

    Attributes:
        x: ``(rows, hidden)``, the input of the experts.
        chosen: ``(rows, k)``, integers, the experts of each row.
        weights: ``(rows, k)``, floating, the weights of the experts' results.
        logits: ``(tokens, experts)``, which the block may return beside the result.
    """

    x: Tensor
    chosen: Tensor
    weights: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Sorted:
    """A router that sorts the slots by expert: it gives their order, tokens and weights, and each expert's count."""

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
        """The results of the tokens ``(tokens, hidden)`` from *y*, the results of their rows."""
        del top_k
        return y


@dataclass(frozen=True)
class Scored:
    """A router that scores all experts, those not chosen with zero; the scores scale the *inputs* of the experts.

    An expert without biases maps zero to zero, so experts with score zero need not be computed.
    """

    label = "input-scaled"

    def read(self, x: Tensor, returned: Any, top_k: int) -> Routed:
        """Make a row of each choice; *x* is ``(tokens, hidden)``, and the router's scores are ``(tokens, experts)``."""
        scores, logits = returned
        chosen, index = scores.topk(top_k, dim=1)
        scaled = (x[:, None] * chosen[..., None]).flatten(0, 1)
        # The original's batched products, and what it makes of them, have autocast's dtype.
        return Routed(narrowed(x, scaled), index.view(-1, 1), torch.ones_like(chosen).view(-1, 1), logits)

    def total(self, y: Tensor, top_k: int) -> Tensor:
        """The results of the tokens ``(tokens, hidden)`` from *y*, the results of their rows."""
        return y if top_k == 1 else y.view(-1, top_k, y.shape[-1]).sum(1)


@dataclass(frozen=True)
class Stacks:
    """The experts of a block, by attribute names.

    Attributes:
        gate_up: The child that holds the first projection, and the projection's name there.
        down: The same for the second projection.
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
        """Both projections; ``None`` if they are not plain tensors, which only the module knows how to call."""
        children: Any = block._modules
        gate_up, down = (children[child]._parameters.get(name) for child, name in (self.gate_up, self.down))
        return (gate_up, down) if type(gate_up) in PLAIN and type(down) in PLAIN else None

    def gate(self, block: nn.Module) -> str | Callable[[Tensor], Tensor]:
        """The activation to compute with."""
        return to_call(self.activation, block if self.holder is None else getattr(block, self.holder), self.layout)


@dataclass(frozen=True)
class RoutedAdapter(Adapter):
    """The forward of a block, which calls its router, and computes its experts' projections in one.

    Attributes:
        variant: The gate, how the block routes and what else it adds.
        stacks: Where the experts are.
        router: The child that routes.
        top_k: Name of the number of experts that a token goes to; dotted if a child has the number.
        answer: The kind of answer that the router gives.
        shared: The expert that every token goes to.
        bias: The parameter that is added at the end.
        row_per_token: Whether the result has a row for each token, whatever the shape of the input.
        logits: Whether the logits are returned beside the result.
    """

    variant: str
    stacks: Stacks
    router: str
    top_k: str
    answer: Sorted | Scored
    shared: str | None
    bias: str | None
    row_per_token: bool
    logits: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """The matrices, the bias, and how many experts a token goes to."""
        matrices = [".".join(cube) for cube in (self.stacks.gate_up, self.stacks.down)]
        return (*matrices, self.top_k, *([self.bias] if self.bias is not None else []))

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states)``.

        ``hidden_states`` is ``(..., hidden)``, of any floating dtype that the block takes. The result has its dtype,
        and its shape or ``(tokens, hidden)``; with *logits*, the logits come second. Errors are those of
        `reference.moe`.
        """
        adapter, stacks = self, self.stacks

        def forward(module: nn.Module, hidden_states: Tensor) -> Any:
            weights = stacks.weights(module)
            if weights is None or is_the_originals(hidden_states):
                return NotImplemented
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            top_k = operator.attrgetter(adapter.top_k)(module)
            routed = adapter.answer.read(x, getattr(module, adapter.router)(x), top_k)
            y = compute(
                routed.x,
                routed.chosen,
                routed.weights,
                *(narrowed(x, weight) for weight in weights),
                transposed=stacks.transposed,
                layout=stacks.layout,
                activation=stacks.gate(module),
            )
            y = adapter.answer.total(y, top_k)
            if adapter.shared is not None:
                y = getattr(module, adapter.shared)(x) + y
            if not adapter.row_per_token:
                y = y.view(hidden_states.shape)
            if adapter.bias is not None:
                y = y + getattr(module, adapter.bias)
            return (y, routed.logits) if adapter.logits else y

        return forward


def match(module: nn.Module) -> list[Proposal] | Rejection | None:
    """Propose for *module* if its experts are stacked in its children, and it has a router."""
    cubes = [
        (child, name)
        for child, holder in module._modules.items()
        if holder is not None and not any(map(has_parameters, holder.children()))
        for name, parameter in holder._parameters.items()
        if parameter is not None and parameter.dim() == 3
    ]
    if len(cubes) != 2:
        return None
    apart = cubes[0][0] != cubes[1][0]
    shapes = {cube: tuple(module._modules[cube[0]]._parameters[cube[1]].shape) for cube in cubes}  # type: ignore[union-attr]
    first, second = sorted(cubes, key=lambda cube: any(word in ".".join(cube) for word in ("down", "out")))
    read = shapes_read(shapes[first], shapes[second])
    holder = None if apart else first[0]
    activated: Any = module if holder is None else module._modules[holder]
    if read is None or (not apart and not takes(type(activated).forward, 1)):
        return None
    activation = gates.activation_of(activated)
    router = router_of(module, (first[0], second[0]), shapes[first][0])
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
    others = [n for n, c in module._modules.items() if c is not None and n not in taken and has_parameters(c)]
    shared = [name for name in others if len(linears_of(module._modules[name])) >= 2]
    biases = [name for name, parameter in module._parameters.items() if parameter is not None]
    if unknown := set(others).difference(shared):
        return Rejection(f"it has children {', '.join(sorted(unknown))} that no known sparse block has")
    if len(shared) > 1 or len(biases) > 1:
        return Rejection(f"it has {', '.join((*shared, *biases))}; known are one shared expert and one bias")
    of_router = top_k_of(getattr(module, router))
    top_k = top_k_of(module) or (of_router and f"{router}.{of_router}")
    if top_k is None:
        return Rejection("neither it nor its router has an attribute that says how many experts a token goes to")
    label = " ".join([answer.label, *("shared" for _ in shared), *("biased" for _ in biases)])
    added = (next(iter(shared), None), next(iter(biases), None))
    adapters = [
        RoutedAdapter(f"{experts.activation} {label}", experts, router, top_k, answer, *added, row_per_token, logits)
        for experts in stacks
        for logits in (True, False)
        for row_per_token in (False, True)
    ]
    holder, name = stacks[0].gate_up
    dtype = getattr(module._modules[holder], name).dtype
    if dtype not in MODEL_DTYPES:
        return Rejection(f"its experts are {dtype}; supported are float32, bfloat16 and float16")
    alike = (mix for mix in mixes_of_modules(dtype) if mix.x is mix.router)
    return [inexact(adapters, functools.partial(_example, module, adapters[0]), alike, covers=stacks[0].children)]


def _example(
    module: nn.Module, likely: RoutedAdapter, mix: ExpertsMix, size: int, generator: torch.Generator
) -> Example:
    """Rows whose routing no rounding can decide, over a few experts, one of them idle.

    Returns:
        x ``(2, tokens / 2, hidden)`` in the dtype of the rows; all children; and the bias.
    """
    stacks = likely.stacks
    holder, name = stacks.down
    real, a, b = getattr(module._modules[holder], name).shape
    hidden, inner = (b, a) if stacks.transposed else (a, b)
    top_k = operator.attrgetter(likely.top_k)(module)
    number = min(real, top_k + 3)
    large = size > 1 << 12
    # Hidden comes first, because it may be twice inner, or inner itself.
    sizes = {hidden: 128 if large else 24, 2 * inner: 272 if large else 16, inner: 136 if large else 8}
    small = SmallCopies({**sizes, real: number}, generator)
    children = {n: small.module(child, mix.x) for n, child in module._modules.items() if child is not None}
    linear = linear_of(children[likely.router], number)
    x = decided(small, linear, top_k, max(6, size // small.size(hidden)), mix.x)
    bias = {} if likely.bias is None else {likely.bias: small.tensor(getattr(module, likely.bias), mix.x)}
    return Example((x,), bias, children, small.attributes(module))
