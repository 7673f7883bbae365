"""Which child of a block is the list of its experts, and what the other children are: a router, a shared expert."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fuseplug import Proposal, Rejection, Target
from fuseplug_backends.dtypes import MODEL_DTYPES

from .. import gates
from ..blocks import has_parameters, linears_of, router_of, takes, top_k_of
from ..gates import named_or_own
from ..mixes import mixes_of_modules
from ..proposals import inexact
from .adapters import BlockAdapter, Idle, ListedExperts, Routing, SeamAdapter
from .examples import example_of_block, example_of_seam


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
    router = None if seam is not None else router_of(module, lists, len(experts))
    if seam is None and router is None:
        return None
    if why := _unfit(lists[0], experts, linears):
        return Rejection(why)
    activations = _activations(first)
    if not activations:
        return Rejection(
            f"its experts, {type(first).__name__}, have no activation that is a child or attribute of theirs, "
            "or that their forward calls by a known name"
        )
    listed = [ListedExperts(lists[0], *names, name) for names in _roles(linears) for name in activations]
    if not listed:
        return Rejection(f"the shapes of {type(first).__name__}'s projections fit no gate, up and down")
    dtype = next(iter(linears.values())).weight.dtype
    if router is None:
        return [_seam(module, listed, dtype)] if seam is not None and takes(seam, 3) else None
    if not takes(type(module).forward, 1):
        return Rejection(f"its forward takes {inspect.signature(type(module).forward)}; known is (hidden states)")
    return _block(module, listed, router, dtype)


def _lists(module: nn.Module) -> list[str]:
    """The children of *module* that may be lists of experts; a list of one, only if *module* says that it has one."""
    lists = {name: len(child) for name, child in module._modules.items() if isinstance(child, nn.ModuleList)}
    many = [name for name, number in lists.items() if number > 1]
    return many or [name for name, number in lists.items() if number == 1 and 1 in gates.numbers_of_experts(module)]


def _activations(expert: nn.Module) -> list[str]:
    """The activations that *expert* may have: names for the one that it holds, or those that its forward calls."""
    activation = gates.activation_of(expert)
    return gates.written_activations(type(expert)) if activation is None else named_or_own(activation)


def _calling_its_own(experts: nn.ModuleList | nn.ModuleDict) -> Rejection | None:
    """An answer for a list of experts that has a forward of its own."""
    first = next(iter(experts._modules.values()), None)
    alike = sum(type(expert) is type(first) for expert in experts.children())
    if type(experts).forward.__module__.startswith("torch.") or alike < 2 or not 2 <= len(linears_of(first)) <= 3:
        return None
    return Rejection("it is a list of experts that calls them itself; a module that has such a list is supported")


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
            if linear.weight.shape != like.weight.shape or linear.weight.dtype not in MODEL_DTYPES:
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


def _seam(module: nn.Module, listed: list[ListedExperts], dtype: torch.dtype) -> Proposal:
    adapters = [SeamAdapter(experts.activation, experts, idle) for experts in listed for idle in _IDLE]
    example = functools.partial(example_of_seam, module, listed[0])
    hidden, _ = listed[0].sizes(module)
    # DeepSeek-V2's method asks whether there are outputs to join. There always are: the original computes calls without
    # tokens.
    own: dict[str, Any] = {"target": Target("moe"), "covers": (listed[0].experts,), "impossible": ("outputs",)}
    return inexact(adapters, example, mixes_of_modules(dtype), hidden, **own)


_IDLE: tuple[Idle, ...] = ("none", "zero")


def _block(
    module: nn.Module, listed: list[ListedExperts], router: str, dtype: torch.dtype
) -> list[Proposal] | Rejection:
    named = (router, listed[0].experts)
    others = {name: child for name, child in module._modules.items() if child is not None and name not in named}
    shared_gate = [name for name, child in others.items() if getattr(child, "out_features", None) == 1]
    shared = [name for name, child in others.items() if len(linears_of(child)) >= 2]
    rest = {name: child for name, child in others.items() if not linears_of(child) and name not in shared_gate}
    correction = [name for name, child in rest.items() if has_parameters(child)]
    if unknown := set(others).difference(shared_gate, shared, correction):
        return Rejection(f"it has children {', '.join(sorted(unknown))} that no known sparse block has")
    if max(map(len, (shared_gate, shared, correction))) > 1:
        return Rejection(f"it has several children of one kind: {', '.join(others)}")
    top_k = top_k_of(module)
    if top_k is None:
        return Rejection("it has no attribute that says how many experts a token goes to")
    flags = [name for name, value in vars(module).items() if type(value) is bool and "norm" in name]
    jitter = gates.scalar_named(module, "jitter")
    floor = gates.scalar_named(module, "norm_min")
    renormalise: list[str | bool] = [*flags] or [True, False]
    correct = next(iter(correction), None)
    ways = [Routing(router, top_k, flag, correct, floor, jitter) for flag in renormalise]
    added = (next(iter(shared), None), next(iter(shared_gate), None))
    adapters = [
        BlockAdapter(_describe(experts, way, shared, shared_gate), experts, way, *added, logits, idle)
        for experts, way, logits, idle in itertools.product(listed, ways, (True, False), _IDLE)
    ]
    example = functools.partial(example_of_block, module, adapters[0])
    hidden, _ = listed[0].sizes(module)
    return [inexact(adapters, example, mixes_of_modules(dtype), hidden, covers=(listed[0].experts,))]


def _describe(listed: ListedExperts, way: Routing, shared: list[str], shared_gate: list[str]) -> str:
    routed = "renormalised" if way.renormalise is True else "as-is" if way.renormalise is False else way.renormalise
    return " ".join([listed.activation, routed, *(["gated" for _ in shared_gate]), *(["shared" for _ in shared])])
