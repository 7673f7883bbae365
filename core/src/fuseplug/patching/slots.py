"""Where a method of an instance lives, and whose it is."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn

from ..insides import attributes_of
from ..words import Target
from .accepts import Mark
from .replacement import mark_of, parts


def class_method(module: nn.Module, method: str) -> types.FunctionType | None:
    """The function that *module*'s class has under the name *method*, if it is a plain one."""
    found = getattr(type(module), method, None)
    return found if isinstance(found, types.FunctionType) else None


def holder(module: nn.Module, method: str) -> str:
    """The name under which the instance holds, or would hold, a *method* of its own.

    accelerate's hooks put a wrapper under ``forward`` and what was there under ``_old_forward``.
    """
    held_now = attributes_of(module)
    hooked = method == "forward" and "_hf_hook" in held_now and "_old_forward" in held_now
    return "_old_forward" if hooked else method


def held(module: nn.Module, method: str) -> Any:
    """What the instance itself holds for *method*; ``None`` if it is its class's."""
    return attributes_of(module).get(holder(module, method))


def is_original(module: nn.Module, method: str) -> bool:
    """Whether *method* is the class's own, bound explicitly or not.

    It is bound explicitly after a pickle's round trip, and after hooks were removed; that is not a patch.
    """
    value = held(module, method)
    return value is None or (
        isinstance(value, types.MethodType)
        and value.__self__ is module
        and value.__func__ is class_method(module, method)
    )


def our_parts(module: nn.Module, method: str) -> dict[Target, Callable[..., Any]]:
    """What of ours is on *method* of this instance, by target."""
    value = held(module, method)
    return parts(value.__func__) if isinstance(value, types.MethodType) and value.__self__ is module else {}


def our_marks(module: nn.Module) -> dict[Target, Mark]:
    """What of ours is on this instance, whatever the method, by target."""
    bound = [value.__func__ for value in attributes_of(module).values() if type(value) is types.MethodType]
    methods = {target.method for function in bound for target in parts(function)}
    return {target: mark_of(part) for method in methods for target, part in our_parts(module, method).items()}


def describe(module: nn.Module, method: str) -> str:
    """Whose the method is now, for a message."""
    value = held(module, method)
    function = getattr(value, "__func__", getattr(value, "func", value))
    name = getattr(function, "__qualname__", type(value).__name__)
    return f"{getattr(function, '__module__', '?')}.{name}"
