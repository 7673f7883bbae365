"""What the signature, attributes, children and shapes of a block say about its experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any

from torch import nn


def linear_of(router: nn.Module, experts: int) -> Any:
    """The layer of *router*, or *router* itself, that gives a logit for each expert; ``None`` if none does."""
    return next((module for module in router.modules() if getattr(module, "out_features", None) == experts), None)


def linears_of(expert: Any) -> dict[str, Any]:
    """The children of *expert* that are linear layers, of whatever make."""
    children = expert._modules.items() if isinstance(expert, nn.Module) else ()
    return {name: child for name, child in children if hasattr(child, "in_features") and hasattr(child, "out_features")}


def has_parameters(module: nn.Module) -> bool:
    """Whether *module* or a module below it has a parameter."""
    return any(True for _ in module.parameters())


def router_of(module: nn.Module, others: Container[str], experts: int) -> str | None:
    """The child of *module*, not among *others*, that gives a logit for each of that many *experts*."""
    children = ((name, child) for name, child in module._modules.items() if child is not None and name not in others)
    return next((name for name, child in children if linear_of(child, experts) is not None), None)


def takes(function: Callable[..., Any], number: int) -> bool:
    """Whether *function*, a method, takes exactly *number* arguments, all positional."""
    _, *parameters = inspect.signature(function).parameters.values()
    return len(parameters) == number and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def top_k_of(module: nn.Module) -> str | None:
    """The attribute with the number of experts that a token goes to: *module*'s own, or one of an object it holds."""
    inner = {f"{name}.": vars(value) for name, value in vars(module).items() if hasattr(value, "__dict__")}
    for prefix, attributes in {"": vars(module), **inner}.items():
        for name, value in attributes.items():
            if type(value) is int and any(word in name for word in ("top_k", "topk", "per_tok")):
                return f"{prefix}{name}"
    return None


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
