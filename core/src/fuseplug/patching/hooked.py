"""Finds out whose hooks and forwards are on the children that fused code does not call."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooked_by(module: nn.Module, route: Sequence[Any]) -> str:
    """The packages whose hooks are on the children at *route* below *module*, for a message; ``""`` if none are."""
    hooks = [hook for child in _at(module, route) for name in HOOKS for hook in getattr(child, name).values()]
    return " and ".join(dict.fromkeys(map(_home, hooks)))


def replaced_by(module: nn.Module, route: Sequence[Any]) -> str:
    """The forwards that replace those of the children at *route* below *module*, for a message; ``""`` if none do."""
    children = [child for child in _at(module, route) if "forward" in child.__dict__]
    others = [child for child in children if not is_own(child.__dict__["forward"], child, type(child).forward)]
    return " and ".join(dict.fromkeys(describe(child, "forward") for child in others))


def is_own(value: Any, module: Any, forward: Any) -> bool:
    """Whether *value* is the class's *forward* bound to *module*, as `kernelize` and pickles leave it on instances."""
    return type(value) is types.MethodType and value.__self__ is module and value.__func__ is forward


def describe(module: nn.Module, method: str) -> str:
    """The origin and name of the *method* that *module* itself holds now, for a message."""
    return name_of(module.__dict__.get(method))


def name_of(value: Any) -> str:
    """The Python module and name of a function, for a message. A wrapper has its own, not those of what it wraps."""
    function = getattr(value, "__func__", getattr(value, "func", value))
    if isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
        return f"{function.__globals__.get('__name__', '?')}.{function.__code__.co_name}"
    name = getattr(function, "__qualname__", type(value).__name__)
    return f"{getattr(function, '__module__', '?')}.{name}"


def _at(module: nn.Module, route: Sequence[Any]) -> Sequence[nn.Module]:
    modules = [module]
    for step in route:
        children = [item for module in modules for item in module._modules.items()]
        modules = [child for name, child in children if child is not None and step.name in ("*", name)]
    return modules


def _home(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]
