"""Sparse blocks that hold their experts in a list, one module each, and often do the routing themselves."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuseplug import Adapter, Compute, Example, Proposal, Rejection, Target
from fuseplug_backends.tracing import is_traced

from ..reference import GateUpLayout
from . import example_rows, gates
from .mixes import DTYPES, ExpertsMix, mixes_of_modules
from .small_copies import SmallCopies
from .stacked_experts import OWN, inexact, named_or_own, own_product, passed, routing
from .under_autocast import narrowed

Idle = Literal["zero", "none"]


@dataclass(frozen=True)
class ListedExperts:
    """The experts of a block, by attribute names.

    Attributes:
        experts: The list.
        gate: The gate projection of each, or the only one before the activation.
        up: The up projection.
        down: The down projection.
        activation: A key of `fuseplug_moe.reference.GATES`, or `OWN`.
        passing: Whether those at the end of the list give back the rows they are given.
    """

    experts: str
    gate: str
    up: str | None
    down: str
    activation: str
    passing: bool = False

    @property
    def layout(self) -> GateUpLayout:
        """As in `fuseplug_moe.reference.moe`."""
        return "ungated" if self.up is None else "concatenated"

    @property
    def reads(self) -> tuple[str, ...]:
        """The matrices of all experts."""
        names = (name for name in (self.gate, self.up, self.down) if name is not None)
        return tuple(f"{self.experts}.*.{name}.weight" for name in names)

    def matrices(self, block: nn.Module) -> dict[str, list[Tensor]]:
        """The weights of all experts, by projection: ``(inner, hidden)``, and ``(hidden, inner)`` for *down*."""
        experts: Any = [*block._modules[self.experts]._modules.values()]  # type: ignore[union-attr]
        experts = experts[: len(experts) - passing_of(experts)] if self.passing else experts
        names = [name for name in (self.gate, self.down, self.up) if name is not None]
        return {name: [expert._modules[name]._parameters["weight"] for expert in experts] for name in names}

    def compute(
        self,
        compute: Compute,
        block: nn.Module,
        routed: tuple[Tensor, Tensor, Tensor],
        idle: Idle,
    ) -> Tensor:
        """What *block* adds up for *routed*: rows ``(tokens, hidden)``, indices and weights ``(tokens, k)``.

        Result and errors are those of `reference.moe`.
        """
        experts: Any = block._modules[self.experts]
        x, *_ = routed
        matrices = {name: [narrowed(x, each) for each in every] for name, every in self.matrices(block).items()}
        result: Tensor = compute(
            *routed,
            matrices[self.gate],
            matrices[self.down],
            up=None if self.up is None else matrices[self.up],
            layout=self.layout,
            activation=own_product(experts[0], self.layout) if self.activation == OWN else self.activation,
            idle=idle,
        )
        passing = range(len(matrices[self.down]), len(experts))
        return result + passed(passing, *routed) if self.passing else result


@dataclass(frozen=True)
class SeamAdapter(Adapter):
    """A method of the block that gets rows, indices and weights.

    Attributes:
        variant: The gate, and what an idle expert's gradient is.
        listed: Where the experts are.
        idle: Whether the gradient of an expert without tokens is zero or ``None``.
    """

    variant: str
    listed: ListedExperts
    idle: Idle

    @property
    def reads(self) -> tuple[str, ...]:
        """The matrices of all experts."""
        return self.listed.reads

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``moe(module, hidden_states, top_k_index, top_k_weights)``.

        The arguments are those of `reference.moe`: ``(tokens, hidden)``, floating; ``(tokens, k)``, integers; and
        ``(tokens, k)``, floating. So are the result and the errors.
        """
        listed, idle = self.listed, self.idle

        def moe(module: nn.Module, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Any:
            if is_the_originals(hidden_states):
                return NotImplemented
            return listed.compute(compute, module, (hidden_states, index, weights), idle)

        return moe


@dataclass(frozen=True)
class Routing:
    """How a block chooses experts: softmax, the largest k, and what is done with them.

    Attributes:
        router: The child that gives logits.
        top_k: Name of the k; with a dot in it where what holds it is an attribute, as arguments are.
        renormalise: Whether the chosen weights are made to sum to one; or the attribute that says so.
        correction: The child that is called on the probabilities before choosing.
        floor: Name of the least sum that is divided by.
        jitter: Name of the noise that training multiplies; such calls are the original's.
    """

    router: str
    top_k: str
    renormalise: bool | str
    correction: str | None
    floor: str | None
    jitter: str | None

    @property
    def reads(self) -> tuple[str, ...]:
        """The numbers, and the dtype of the router's weight."""
        flag = self.renormalise if isinstance(self.renormalise, str) else None
        numbers = (name for name in (self.top_k, flag, self.floor, self.jitter) if name is not None)
        return (*numbers, f"{self.router}.weight")

    def route(self, block: nn.Module, hidden_states: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, indices and weights for the rows *x* of *hidden_states*.

        Args:
            block: The block.
            hidden_states: ``(batch, sequence, hidden)``, floating; what a router is called with that has no weight.
            x: The same as ``(tokens, hidden)``.

        Returns:
            ``(tokens, experts)`` in the dtype of the router; ``(tokens, k)`` int64; ``(tokens, k)`` in that of *x*.
        """
        router: Any = block._modules[self.router]
        weight = getattr(router, "weight", None)
        if weight is None:
            logits = router(hidden_states)
        else:
            logits = router(x if x.dtype is weight.dtype else x.to(weight.dtype))
        probabilities = functional.softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
        top_k = operator.attrgetter(self.top_k)(block)
        if self.correction is None:
            weights, index = torch.topk(probabilities, top_k, dim=-1)
        else:
            index = torch.topk(getattr(block, self.correction)(probabilities), top_k, dim=-1)[1]
            weights = probabilities.gather(-1, index)
        renormalise = getattr(block, self.renormalise) if isinstance(self.renormalise, str) else self.renormalise
        if renormalise:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total if self.floor is None else total.clamp(min=getattr(block, self.floor)))
        return logits, index, weights.to(x.dtype)


@dataclass(frozen=True)
class BlockAdapter(Adapter):
    """The forward of a block that routes.

    Attributes:
        variant: The gate, and how it routes.
        listed: Where the experts are.
        routing: How they are chosen.
        shared: The expert that every token goes to.
        shared_gate: The child whose sigmoid weighs it.
        logits: Whether the logits are returned beside the result.
        idle: Whether the gradient of an expert without tokens is zero or ``None``.
    """

    variant: str
    listed: ListedExperts
    routing: Routing
    shared: str | None
    shared_gate: str | None
    logits: bool
    idle: Idle

    @property
    def reads(self) -> tuple[str, ...]:
        """The matrices of all experts, and what the routing reads."""
        return (*self.listed.reads, *self.routing.reads)

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states)``.

        ``hidden_states`` is ``(..., hidden)``, of any floating dtype that the block takes. The result has its shape and
        dtype; with *logits*, those come second, ``(tokens, experts)``. Errors are those of `reference.moe`.
        """
        how = self

        def forward(module: nn.Module, hidden_states: Tensor) -> Any:
            if is_the_originals(hidden_states) or how._jitters(module):
                return NotImplemented
            return how._compute(compute, module, hidden_states)

        return forward

    def _jitters(self, module: nn.Module) -> bool:
        jitter = self.routing.jitter
        return jitter is not None and module.training and getattr(module, jitter) > 0

    def _compute(self, compute: Compute, module: nn.Module, hidden_states: Tensor) -> Any:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, index, weights = self.routing.route(module, hidden_states, x)
        y = self.listed.compute(compute, module, (x, index, weights), self.idle)
        if self.shared is not None:
            shared = getattr(module, self.shared)(x)
            if self.shared_gate is not None:
                shared = torch.sigmoid(getattr(module, self.shared_gate)(x)) * shared
            y = y + shared
        y = y.view(hidden_states.shape)
        return (y, logits) if self.logits else y


def is_the_originals(x: Tensor) -> bool:
    """Whether a call is the original's.

    Tracers follow a list of experts with breaks only; and without a token it looks at no weight, and leaves each
    without a gradient.
    """
    return is_traced() or not x.numel()


def match(module: nn.Module) -> list[Proposal] | Rejection | None:
    """Propose for *module* if it holds a list of experts."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return _calling_its_own(module)
    lists = _lists(module)
    if len(lists) != 1:
        return None
    experts: Any = module._modules[lists[0]]
    first = experts[0]
    linears = linears_of(first)
    if not 2 <= len(linears) <= 3 or len(module._modules) < 2:
        return None
    seam = getattr(type(module), "moe", None)
    router = None if seam is not None else _router(module, lists[0], len(experts))
    if seam is None and router is None:
        return None
    passing = passing_of(experts)
    if why := _unfit(lists[0], experts[: len(experts) - passing], linears):
        return Rejection(why)
    known = _activations(first)
    if not known:
        return Rejection(
            f"its experts, {type(first).__name__}, have no activation that is a child or attribute of theirs, "
            "or that their forward calls by a known name"
        )
    listed = [ListedExperts(lists[0], *names, each, passing > 0) for names in _roles(linears) for each in known]
    if not listed:
        return Rejection(f"the shapes of {type(first).__name__}'s projections fit no gate, up and down")
    dtype = next(iter(linears.values())).weight.dtype
    if router is None:
        return [_seam(module, listed, dtype)] if seam is not None and takes(seam, 3) else None
    if not takes(type(module).forward, 1):
        return Rejection(f"its forward takes {inspect.signature(type(module).forward)}; known is (hidden states)")
    return _block(module, listed, router, dtype)


def _lists(module: nn.Module) -> list[str]:
    """The children of *module* that may be lists of experts; a list of one only if the module says that it has one."""
    lists = {name: len(child) for name, child in module._modules.items() if isinstance(child, nn.ModuleList)}
    many = [name for name, number in lists.items() if number > 1]
    return many or [name for name, number in lists.items() if number == 1 and gates.says_how_many(module, 1)]


def _activations(expert: nn.Module) -> list[str]:
    """What the activation of *expert* may be: of one that it holds, its name and that it is its own."""
    held = gates.activation_of(expert)
    if held is None:
        return gates.written_activations(type(expert))
    return named_or_own(held)


def _calling_its_own(experts: nn.ModuleList | nn.ModuleDict) -> Rejection | None:
    """An answer for a list of experts that has a forward of its own."""
    first = next(iter(experts._modules.values()), None)
    alike = sum(type(each) is type(first) for each in experts.children())
    if type(experts).forward.__module__.startswith("torch.") or alike < 2 or not 2 <= len(linears_of(first)) <= 3:
        return None
    return Rejection("it is a list of experts that calls them itself; known is a module with such a list among others")


def passing_of(experts: Any) -> int:
    """How many at the end of the list *experts* give back the rows they are given."""
    return len([*itertools.takewhile(lambda expert: type(expert) is nn.Identity, reversed(experts))])


def linears_of(expert: Any) -> dict[str, Any]:
    """The children of *expert* that are linear layers, of whatever make."""
    children = expert._modules.items() if isinstance(expert, nn.Module) else ()
    return {name: child for name, child in children if hasattr(child, "in_features") and hasattr(child, "out_features")}


def _unfit(name: str, experts: Any, linears: dict[str, Any]) -> str:
    """Why the experts cannot be computed from their weights alone; ``""`` if they can."""
    kinds = {type(expert) for expert in experts}
    if len(kinds) > 1:
        return f"its {name} are of several classes: {', '.join(sorted(kind.__name__ for kind in kinds))}"
    for number, expert in enumerate(experts):
        for role, like in linears.items():
            linear = expert._modules.get(role)
            if type(linear) is not nn.Linear:
                return (
                    f"{name}.{number}.{role} is {type(linear).__module__}.{type(linear).__name__}, not a plain Linear: "
                    "apply before adapters and quantization, or merge them first"
                )
            if linear.bias is not None:
                return f"{name}.{number}.{role} has a bias, which no known list of experts has"
            if linear.weight.shape != like.weight.shape or linear.weight.dtype not in DTYPES:
                wanted = f"{[*like.weight.shape]} in float32, bfloat16 or float16"
                return f"{name}.{number}.{role} must be {wanted}; it is {linear.weight.dtype}{[*linear.weight.shape]}"
    return ""


def _roles(linears: dict[str, Any]) -> Iterator[tuple[str, str | None, str]]:
    """The ways to read the names of the projections as (gate, up, down), the likely one first."""
    likely = sorted(linears, key=lambda name: ("down" in name, "gate" not in name))
    for names in itertools.permutations(likely):
        gate, up, down = names if len(names) == 3 else (names[0], None, names[1])
        if any("gate" in name for name in names) and "gate" not in gate:
            continue
        if any("down" in name for name in names) and "down" not in down:
            continue
        shape = linears[gate].weight.shape
        if (up is None or linears[up].weight.shape == shape) and linears[down].weight.shape == shape[::-1]:
            yield gate, up, down


def takes(function: Callable[..., Any], number: int) -> bool:
    """Whether *function*, a method, takes so many arguments and no others."""
    _, *parameters = inspect.signature(function).parameters.values()
    return len(parameters) == number and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _seam(module: nn.Module, listed: list[ListedExperts], dtype: torch.dtype) -> Proposal:
    adapters = [SeamAdapter(f"{each.activation}", each, idle) for each in listed for idle in _IDLE]
    example = functools.partial(_seam_example, module, listed[0])
    hidden, _ = _sizes(getattr(module, listed[0].experts), listed[0])
    return inexact(adapters, example, mixes_of_modules(dtype), (listed[0].experts,), Target("moe"), hidden)


_IDLE: tuple[Idle, ...] = ("none", "zero")


def _sizes(experts: Any, listed: ListedExperts) -> tuple[int, int]:
    inner, hidden = experts[0]._modules[listed.gate].weight.shape
    return hidden, inner


def _seam_example(
    module: nn.Module, listed: ListedExperts, mix: ExpertsMix, size: int, generator: torch.Generator
) -> Example:
    """Five experts, one of them idle.

    Returns:
        x ``(tokens, hidden)`` in the dtype of the rows; indices and weights ``(tokens, 2)``, the weights in the
        router's dtype; and the experts.
    """
    experts: Any = module._modules[listed.experts]
    few = _few(experts, listed, 5)
    small, hidden = _small_copies(experts, listed, {len(experts): len(few)}, size, generator)
    x = small.normal(max(6, size // hidden), hidden).to(mix.x)
    index, weights = routing(len(x), len(few), generator)
    return Example(
        (x, index, weights.to(mix.router)),
        children={listed.experts: nn.ModuleList([small.module(expert, mix.experts) for expert in few])},
        attributes=small.attributes(module),
    )


def _few(experts: Any, listed: ListedExperts, number: int) -> list[nn.Module]:
    """At most *number* of the experts, two that pass their rows among them if there are as many."""
    number = min(number, len(experts))
    passing = min(passing_of(experts), 2, number - 1) if listed.passing else 0
    return [*experts[: number - passing], *experts[len(experts) - passing :]]


def _small_copies(
    experts: Any, listed: ListedExperts, known: dict[int, int], size: int, generator: torch.Generator
) -> tuple[SmallCopies, int]:
    hidden, inner = _sizes(experts, listed)
    large = size > 1 << 12
    known = {**known, inner: known.get(inner, 272 if large else 7)}
    known = {**known, hidden: known.get(hidden, 128 if large else 12)}
    return SmallCopies(known, generator), known[hidden]


def _router(module: nn.Module, experts: str, number: int) -> str | None:
    """The child of *module* that gives a logit for each expert."""
    for name, child in module._modules.items():
        if name != experts and child is not None and example_rows.linear_of(child, number) is not None:
            return name
    return None


def _block(
    module: nn.Module, listed: list[ListedExperts], router: str, dtype: torch.dtype
) -> list[Proposal] | Rejection:
    others = [
        name for name, child in module._modules.items() if child is not None and name not in (router, listed[0].experts)
    ]
    shared_gate = [name for name in others if getattr(module._modules[name], "out_features", None) == 1]
    shared = [name for name in others if len(linears_of(module._modules[name])) >= 2]
    correction = [
        name
        for name in others
        if not linears_of(module._modules[name]) and name not in shared_gate and _own(module, name)
    ]
    if unknown := set(others).difference(shared_gate, shared, correction):
        return Rejection(f"it has children {', '.join(sorted(unknown))} that no known sparse block has")
    if max(map(len, (shared_gate, shared, correction))) > 1:
        return Rejection(f"it has more than one child of a kind: {', '.join(others)}")
    top_k = top_k_of(module)
    if top_k is None:
        return Rejection("it has no attribute that says how many experts a token goes to")
    flags = [name for name, value in vars(module).items() if type(value) is bool and "norm" in name]
    jitter = gates.scalar_named(module, "jitter")
    floor = gates.scalar_named(module, "norm_min")
    how: list[str | bool] = [*flags] or [True, False]
    ways = [Routing(router, top_k, each, _one(correction), floor, jitter) for each in how]
    adapters = [
        BlockAdapter(
            _describe(each, way, shared, shared_gate), each, way, _one(shared), _one(shared_gate), logits, idle
        )
        for each, way, logits, idle in itertools.product(listed, ways, (True, False), _IDLE)
    ]
    example = functools.partial(_block_example, module, adapters[0])
    hidden, _ = _sizes(getattr(module, listed[0].experts), listed[0])
    return [inexact(adapters, example, mixes_of_modules(dtype), (listed[0].experts,), hidden=hidden)]


def top_k_of(module: nn.Module) -> str | None:
    """The name of the number of experts that a token goes to: of *module*'s own, or of what it holds."""
    held = {name: vars(value) for name, value in vars(module).items() if hasattr(value, "__dict__")}
    for prefix, attributes in {"": vars(module), **{f"{name}.": inner for name, inner in held.items()}}.items():
        for name, value in attributes.items():
            if type(value) is int and any(word in name for word in ("top_k", "topk", "per_tok")):
                return f"{prefix}{name}"
    return None


def _own(module: nn.Module, name: str) -> bool:
    return any(True for _ in module._modules[name].parameters())  # type: ignore[union-attr]


def _one(names: list[str]) -> str | None:
    return names[0] if names else None


def _describe(listed: ListedExperts, way: Routing, shared: list[str], shared_gate: list[str]) -> str:
    routed = "renormalised" if way.renormalise is True else "as-is" if way.renormalise is False else way.renormalise
    return " ".join([listed.activation, routed, *(["gated" for _ in shared_gate]), *(["shared" for _ in shared])])


def _block_example(
    module: nn.Module, likely: BlockAdapter, mix: ExpertsMix, size: int, generator: torch.Generator
) -> Example:
    """Rows whose routing no rounding can decide, over a few experts, one of which no row is routed to.

    Returns:
        x ``(2, tokens / 2, hidden)`` in the dtype of the rows; and all children.
    """
    listed, way = likely.listed, likely.routing
    experts: Any = module._modules[listed.experts]
    top_k = operator.attrgetter(way.top_k)(module)
    few = _few(experts, listed, top_k + 3)
    number = len(few)
    small, hidden = _small_copies(experts, listed, {len(experts): number}, size, generator)
    children = {
        name: small.module(child, mix.router if name == way.router else mix.x)
        for name, child in module._modules.items()
        if child is not None and name != listed.experts
    }
    children[listed.experts] = nn.ModuleList([small.module(expert, mix.experts) for expert in few])
    correct = None if way.correction is None else children[way.correction]
    for bias in () if correct is None else correct.parameters():
        # Small beside a probability, so that it does not decide by itself who is chosen.
        bias.data *= _CORRECTION
    linear = example_rows.linear_of(children[way.router], number)
    x = example_rows.decided(small, linear, top_k, max(6, size // hidden), mix.x, correct)
    return Example((x,), children=children, attributes=small.attributes(module))


_CORRECTION = 0.03
