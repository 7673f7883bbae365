"""Experts whose weights are stacked in two tensors, the routing left to the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug import Adapter, Compute, Example, Proposal, Rejection, Target

from ..reference import GATES, GateUpLayout
from . import gates
from .indices import PARALLEL, names_experts
from .mixes import DTYPES, ExpertsMix, mixes
from .small_copies import SmallCopies

PLAIN = (Tensor, nn.Parameter)
ROUNDINGS = 16.0
WORKING_ROUNDINGS = 64.0
_FORWARD = Target()
OWN = "own"
"""The activation of an adapter that calls the module's own gate."""

_KINKED = ("relu", OWN)
"""Gates with a jump in their derivative, or that may have one: on which side of it a number is, rounding must not
decide."""


_FAR = 100.0
"""A limit that no example reaches."""


_CONSTANT = 4.0

_IMPOSSIBLE = ("expert_idx == self.num_experts", "token_idx.numel() == 0", "top_k_index.numel() == 0")
"""What loops over the experts that were hit ask. `one_hot` with so many classes raises before the first is true; an
expert that was hit has tokens; and calls without any tokens, where they differ, are the original's."""


@dataclass(frozen=True)
class StackedParts:
    """What was found in a module, by attribute names.

    Attributes:
        gate_up: The first projection.
        down: The second one.
        gate_up_bias: The bias of the first.
        down_bias: That of the second.
        transposed: Whether matrices are (in, out).
        halves: 2 where gate and up share the first projection, 1 where there is no gate.
        weights_first: Whether the forward takes the routing weights before the indices.
        dense: Whether it takes a weight for each expert, rather than for each one chosen.
        post: The child that is called on the rows of all experts before they are weighted.
        passing: Whether the first projection has more experts than the second: these give back their rows.
        count: Name of the number of experts.
    """

    gate_up: str
    down: str
    gate_up_bias: str | None
    down_bias: str | None
    transposed: bool
    halves: int
    weights_first: bool
    dense: bool
    post: str | None
    passing: bool = False
    count: str | None = None


@dataclass(frozen=True)
class StackedAdapter(Adapter):
    """Calls the experts with what the module holds at the time of the call.

    Attributes:
        variant: The gate, and how the weights lie.
        parts: Where they are.
        activation: A key of `GATES`, or `OWN`.
        layout: How gate and up share the first projection.
        limit: Name of the number at which the gate clamps.
        alpha: Name of the slope of its sigmoid.
        keeps_eval: Whether the module itself is called in eval mode with gradients: if it computes every expert for
            every token then, weights of zero have gradients too.
    """

    variant: str
    parts: StackedParts
    activation: str
    layout: GateUpLayout
    limit: str | None
    alpha: str | None
    keeps_eval: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The weights, their number, the limit and the slope; and the gate, where the module's own is called."""
        parts = self.parts
        weights = (parts.gate_up, parts.down, parts.gate_up_bias, parts.down_bias)
        names = (*weights, parts.count, PARALLEL, self.limit, self.alpha)
        own = ("_apply_gate",) if self.activation == OWN and self.layout != "ungated" else ()
        return (*(name for name in names if name is not None), *own)

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states, top_k_index, top_k_weights)``, in the order of the module.

        ``hidden_states`` is ``(..., hidden)``, floating; the others are ``(tokens, k)``, integers and floating, or for
        *dense* weights ``(tokens, experts)``. The result has the shape and dtype of ``hidden_states``. Errors are those
        of `reference.moe`.
        """
        parts, how = self.parts, self

        def forward(module: nn.Module, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Any:
            gate_up, down = getattr(module, parts.gate_up), getattr(module, parts.down)
            # A DTensor, or what a quantizer put there, brings operations of its own, which the module knows how to
            # call.
            if (
                type(gate_up) not in PLAIN
                or type(down) not in PLAIN
                or (how.keeps_eval and not module.training and torch.is_grad_enabled())
                or (parts.count is not None and getattr(module, parts.count) != len(down))
                or not names_experts(module, weights if parts.weights_first else index, len(gate_up))
            ):
                return NotImplemented
            if parts.weights_first:
                index, weights = weights, index
            if parts.dense:
                weights = weights.gather(1, index.clamp(max=len(gate_up) - 1))
            x = hidden_states if hidden_states.dim() == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
            y = compute(
                x,
                index,
                weights,
                gate_up[: len(down)] if parts.passing else gate_up,
                down,
                gate_up_bias=None if parts.gate_up_bias is None else getattr(module, parts.gate_up_bias),
                down_bias=None if parts.down_bias is None else getattr(module, parts.down_bias),
                transposed=parts.transposed,
                layout=how.layout,
                activation=own_gate(module, how.layout) if how.activation == OWN else how.activation,
                limit=None if how.limit is None else getattr(module, how.limit),
                alpha=1.702 if how.alpha is None else getattr(module, how.alpha),
                post=None if parts.post is None else getattr(module, parts.post),
            )
            if parts.passing:
                y = y + passed(range(len(down), len(gate_up)), x, index, weights)
            return y.view(hidden_states.shape)

        return forward


def passed(experts: range, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What the experts with the numbers *experts* add: the rows as they are, weighted.

    *x* is ``(tokens, hidden)``, *index* and *weights* are ``(tokens, k)``; the result is like *x*.
    """
    others = (index < experts.start) | (index >= experts.stop)
    return (x * weights.masked_fill(others, 0).sum(-1, keepdim=True)).to(x.dtype)


def own_gate(module: nn.Module, layout: GateUpLayout) -> Callable[[Tensor], Tensor]:
    """The gate of *module*: a function of the rows of its first projection, ``(pairs, inner or 2 · inner)``.

    It gives ``(pairs, inner)``.

    Raises:
        TypeError: If the module has neither a gate nor an activation.
    """
    gate: Callable[[Tensor], Tensor] | None = getattr(module, "_apply_gate", None)
    if gate is not None and layout != "ungated":
        return gate
    return own_product(module, layout)


def own_product(module: nn.Module, layout: GateUpLayout) -> Callable[[Tensor], Tensor]:
    """As `own_gate`, of a module that has no gate, but an activation."""
    activation = gates.activation_of(module)
    if activation is None:
        raise TypeError(f"{type(module).__name__} has no activation")
    return activation if layout == "ungated" else functools.partial(product, activation)


def named_or_own(activation: Callable[[Tensor], Tensor]) -> list[str]:
    """What *activation* may be called: its row of `GATES`, if it is one, and `OWN`."""
    return [name for name in (gates.named_activation(activation), OWN) if name]


def inexact(
    adapters: Sequence[Adapter],
    example: Callable[[Any, int, torch.Generator], Example],
    mixes: Iterable[Any],
    covers: Sequence[str] = (),
    target: Target = _FORWARD,
    hidden: int = 1,
) -> Proposal:
    """A proposal for experts, whose own matrix products have an order of summation of their own.

    Where kernels gain from some number of tokens on, *hidden* is the width of the input.
    """
    return Proposal(
        target=target,
        adapters=tuple(adapters),
        example=example,
        mixes=tuple(mixes),
        roundings=ROUNDINGS,
        working_roundings=WORKING_ROUNDINGS,
        covers=tuple(covers),
        exact=False,
        work=1 / hidden,
    )


def product(activation: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """``activation(gate) * up``, ``(..., inner)``, for rows that are gate and up side by side, ``(..., 2 · inner)``."""
    gate, up = rows.chunk(2, dim=-1)
    return activation(gate) * up


def match(module: nn.Module) -> list[Proposal] | Rejection | None:
    """Propose for *module* if it is built like stacked experts."""
    cubes = [name for name, p in module._parameters.items() if p is not None and p.dim() == 3]
    if len(cubes) > 2 and gates.says_how_many(module, len(module._parameters[cubes[0]])):  # type: ignore[arg-type]
        return Rejection(f"its experts have projections {', '.join(cubes)}; known are two, gate and up in one")
    if len(cubes) != 2:
        return None
    found = _stacked_parts(module)
    if isinstance(found, Rejection):
        # Two tensors of three dimensions are no rarity.
        return found if gates.speaks_of_experts(module) else None
    dtype = getattr(module, found.gate_up).dtype
    adapters = tuple(_adapters(module, found))
    if found.dense:
        adapters += tuple(replace(each, keeps_eval=True) for each in adapters)
    if not adapters:
        return Rejection(f"{type(module).__name__} has neither a gate of its own nor an activation to call")
    shared_out = (PARALLEL in vars(module) or found.dense) and not found.passing
    every = [*mixes(dtype), *([ExpertsMix(dtype, dtype, dtype, elsewhere=True)] if shared_out else [])]
    _, hidden, _ = _sizes(module, found)
    proposal = inexact(adapters, functools.partial(_example, module, found, adapters[0]), every, hidden=hidden)
    return [replace(proposal, impossible=_IMPOSSIBLE)]


def flattened(module: nn.Module) -> Rejection | None:
    """An answer for experts whose weights are plain attributes, as FSDP leaves them where it flattens parameters."""
    cubes = [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.dim() == 3]
    if len(cubes) < 2 or not gates.speaks_of_experts(module):
        return None
    return Rejection(
        f"its weights {', '.join(cubes)} are no parameters of its own; FSDP leaves them so where it flattens: fuse "
        "before wrapping, or wrap with use_orig_params=True or fully_shard"
    )


def _stacked_parts(module: nn.Module) -> StackedParts | Rejection:
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    cubes = [name for name, p in parameters.items() if p.dim() == 3]
    first, second = sorted(cubes, key=lambda name: "down" in name)
    shape, then = (tuple(parameters[name].shape) for name in (first, second))
    passing = shape[0] > then[0] and any(isinstance(child, nn.Identity) for child in module._modules.values())
    read = shapes_read((then[0], *shape[1:]) if passing else shape, then)
    if read is None:
        return Rejection(
            f"the shapes of its experts disagree: {first} is {list(shape)}, {second} is {list(then)}; known are "
            "(experts, inner or 2 · inner, hidden) with (experts, hidden, inner), and both transposed"
        )
    transposed, halves = read
    count = next((n for n, v in vars(module).items() if n.startswith("num") and "expert" in n and type(v) is int), None)
    if count is not None and getattr(module, count) != then[0] and not _is_shared_out(module, count, then[0]):
        holding = second if passing else first
        return Rejection(f"it says {count}={getattr(module, count)} and {holding} holds {then[0]} experts")
    dtypes = {p.dtype for p in parameters.values()}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        return Rejection(f"its experts are {found}; supported is one of float32, bfloat16 and float16 for all")
    order = _order(type(module).forward)
    if order is None:
        return Rejection(
            f"its forward takes {inspect.signature(type(module).forward)}; known is (hidden states, indices, weights)"
        )
    width, hidden = (shape[2], then[2]) if transposed else (shape[1], then[1])
    flat = [name for name, p in parameters.items() if p.dim() != 3]
    biases: dict[tuple[int, ...], str] = {(shape[0], width): "gate_up_bias", (shape[0], hidden): "down_bias"}
    found_biases: dict[str, str] = {}
    for name in flat:
        role = "down_bias" if "down" in name else biases.get(tuple(parameters[name].shape))
        if role is None or role in found_biases:
            return Rejection(f"it has a parameter {name} {list(parameters[name].shape)} that no known experts have")
        found_biases[role] = name
    post = [n for n, c in module._modules.items() if c is not None and any(True for _ in c.parameters())]
    post = [name for name in post if module._modules[name] is not gates.activation_of(module)]
    if len(post) > 1:
        return Rejection(f"it has children {', '.join(post)} with weights; known is one, a norm of each expert's rows")
    second_name, third_name, weights_first = order
    flagged = "is_transposed" in vars(module) or "top" in (second_name if weights_first else third_name)
    return StackedParts(
        first,
        second,
        found_biases.get("gate_up_bias"),
        found_biases.get("down_bias"),
        transposed,
        halves,
        weights_first=weights_first,
        dense=not flagged,
        post=next(iter(post), None),
        passing=passing,
        count=count,
    )


def _is_shared_out(module: nn.Module, count: str, held: int) -> bool:
    """Whether the experts are shared out over ranks: a DTensor says how many there are on all of them."""
    here = getattr(module, count)
    return bool(getattr(module, PARALLEL, False)) and 0 < here < held and held % here == 0


def shapes_read(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[bool, int] | None:
    """Whether the matrices are transposed, and how many halves the first has; ``None`` if the shapes disagree."""
    if first[0] != second[0]:
        return None
    for halves in (2, 1):
        if (first[2], first[1]) == (second[1], halves * second[2]):
            return False, halves
        if (first[1], first[2]) == (second[2], halves * second[1]):
            return True, halves
    return None


def _order(forward: Callable[..., Any]) -> tuple[str, str, bool] | None:
    """The names of the second and third parameter, and whether weights come first; ``None`` for another signature."""
    _, *parameters = inspect.signature(forward).parameters.values()
    if len(parameters) != 3 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    second, third = parameters[1].name, parameters[2].name
    return second, third, "weight" in second and "weight" not in third


def _adapters(module: nn.Module, parts: StackedParts) -> Iterator[StackedAdapter]:
    limit, alpha = gates.scalar_named(module, "limit"), gates.scalar_named(module, "alpha")
    for activation, layout in _gates(module, parts, limit, alpha):
        traits = [
            activation,
            "interleaved" if layout == "interleaved" else "",
            "ungated" if layout == "ungated" else "",
            "transposed" if parts.transposed else "",
            "biased" if parts.gate_up_bias else "",
            "post-norm" if parts.post else "",
            "passing" if parts.passing else "",
        ]
        named = activation in GATES
        clamps = named and GATES[activation].clamp is not None
        slope = alpha if named and clamps else None
        yield StackedAdapter(
            " ".join(filter(None, traits)), parts, activation, layout, limit if clamps else None, slope
        )


def _gates(
    module: nn.Module, parts: StackedParts, limit: str | None, alpha: str | None
) -> Iterator[tuple[str, GateUpLayout]]:
    """What the gate may be, with the layout: as a row of the table if it is one, and as the module's own."""
    activation = gates.activation_of(module)
    own = getattr(module, "_apply_gate", None)
    if parts.halves == 1:
        if activation is not None:
            yield from ((name, "ungated") for name in named_or_own(activation))
    elif own is not None:
        bounds = (
            None if limit is None else float(getattr(module, limit)),
            1.702 if alpha is None else getattr(module, alpha),
        )
        named = gates.named_gate(own, *bounds)
        if named is not None:
            yield named  # type: ignore[misc]
        yield OWN, "concatenated"
    elif activation is not None:
        yield from ((name, "concatenated") for name in named_or_own(activation))
    else:
        rows = [name for name, gate in GATES.items() if limit is not None or gate.clamp is None]
        layouts: tuple[GateUpLayout, ...] = ("interleaved", "concatenated")
        yield from ((name, layout) for name in reversed(rows) for layout in layouts)


def _example(
    module: nn.Module,
    parts: StackedParts,
    likely: StackedAdapter,
    mix: ExpertsMix,
    size: int,
    generator: torch.Generator,
) -> Example:
    """A few experts, one of them idle, and rows that take their gates well past where they clamp.

    Returns:
        x ``(tokens, hidden)`` in the dtype of the rows, with a leading 1 where weights are dense; indices
        ``(tokens, 2)``; weights like them or ``(tokens, experts)``, in the router's dtype; and the parameters, in that
        of the experts.
    """
    number, hidden, inner = _sizes(module, parts)
    experts, large = min(number, 5), size > 1 << 12
    all_of_them = len(getattr(module, parts.gate_up)) if parts.passing else number
    every = experts + min(2, all_of_them - number)
    # Multiples of eight, because torch's grouped matmul wants rows that begin at multiples of 16 bytes.
    known = {number: experts, 2 * inner: 272 if large else 16, inner: 136 if large else 8}
    known |= {all_of_them: every}
    small = SmallCopies({**known, hidden: known.get(hidden, 128 if large else 24)}, generator)
    h, i = small.size(hidden), small.size(inner)
    width = parts.halves * i
    tokens = max(6, size // h)
    limit = gates.scalar_named(module, "limit")
    bound = None if limit is None or getattr(module, limit) > _FAR else float(getattr(module, limit))
    x = small.normal(tokens, h)
    # The first column of x is constant, and so its weights say around what each column of the projection lies.
    x[:, 0] = _CONSTANT
    kinked = likely.activation in _KINKED
    gate_up = small.normal(
        every, width, h, scale=(1.5 if bound is None and not kinked else 0.12 * (bound or 5.0)) * h**-0.5
    )
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
        chosen, there = index.clamp(max=experts - 1), weights.masked_fill(index >= experts, 0)
        weights = torch.zeros(tokens, experts, dtype=mix.router, device="cpu").scatter_add(1, chosen, there)
    x = x.to(mix.x)
    post = None if parts.post is None else module._modules[parts.post]
    return Example(
        (x[None] if parts.dense else x, *((weights, index) if parts.weights_first else (index, weights))),
        {name: value.to(mix.experts) for name, value in parameters.items()},
        {} if parts.post is None or post is None else {parts.post: small.module(post, mix.experts)},
        # What computes every expert may do so in eval mode alone: then it is in training that a kernel is called.
        {
            **small.attributes(module),
            **({"training": True} if parts.dense else {}),
            # Some implementations of experts look at such rows only if this flag says that there may be any.
            **({PARALLEL: True} if mix.elsewhere and PARALLEL in vars(module) else {}),
        },
    )


def _put_around(weight: Tensor, values: tuple[float, ...], generator: torch.Generator) -> None:
    chosen = torch.randint(len(values), weight.shape[:-1], generator=generator, device="cpu")
    weight[..., 0] = torch.tensor(values, dtype=torch.float32, device="cpu")[chosen] / _CONSTANT


def _sizes(module: nn.Module, parts: StackedParts) -> tuple[int, int, int]:
    number, a, b = getattr(module, parts.down).shape
    if parts.count is not None:
        number = getattr(module, parts.count)
    return (number, b, a) if parts.transposed else (number, a, b)


def routing(tokens: int, experts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two experts for each token, where there are as many; the middle one is idle.

    Returns:
        Indices ``(tokens, 2)`` int64, and weights ``(tokens, 2)`` float32.
    """
    idle = experts // 2
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float32, device="cpu") + 0.1
    chosen = scores.clone()
    if experts > 1:
        chosen[:, idle] = 0
    index = chosen.topk(min(2, max(1, experts - 1)), sorted=False)[1]
    return index, scores.gather(1, index)
