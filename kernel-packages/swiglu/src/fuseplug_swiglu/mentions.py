"""What a forward says: the names in its code, which is all that it can be made of.

A cheap way to leave out what cannot be, before anything is run: a forward that never says ``clamp`` does not clamp.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, cast

from torch import nn


@functools.lru_cache(maxsize=4096)
def mentioned(cls: Hashable) -> dict[str, int]:
    """Every name in the code of the forward of *cls*, and of what that calls by name, by order of first mention."""
    module = cast("type[nn.Module]", cls)
    return _names(module.forward, module)


def words_of(value: object) -> Iterable[str]:
    """The names that tell what an activation is: a module without tensors, or a function, which an attribute holds."""
    if isinstance(value, nn.Module):
        for held in vars(value).values():
            yield from words_of(held) if not isinstance(held, nn.Module) else ()
        yield from mentioned(cast("Hashable", type(value)))
    elif isinstance(value, functools.partial):
        yield from words_of(value.func)
    elif isinstance(value, types.MethodType | types.FunctionType | types.BuiltinFunctionType):
        yield value.__name__
        yield from _names(getattr(value, "__func__", value), None)


def _names(function: Callable[..., Any], cls: type[nn.Module] | None) -> dict[str, int]:
    names: dict[str, int] = {}
    waiting, seen = [function], set()
    for called in waiting:  # grows on the way
        for code in _codes(called):
            if code in seen:
                continue
            seen.add(code)
            for name in code.co_names:
                names.setdefault(name, len(names))
                waiting += _functions(name, cls, called)
    return names


def _functions(name: str, cls: type[nn.Module] | None, user: Callable[..., Any]) -> list[types.FunctionType]:
    """What *name* may call in the code of *user*: a global, or a method of *cls*, by ``super()`` too."""
    namespaces = [getattr(user, "__globals__", {})]
    for base in cls.__mro__ if cls is not None else ():
        if base is nn.Module:
            break
        namespaces.append(vars(base))
    found = [namespace.get(name) for namespace in namespaces]
    return [function for function in found if isinstance(function, types.FunctionType)]


@functools.lru_cache(maxsize=4096)
def required(cls: Hashable) -> int | None:
    """How many arguments the forward of *cls* must be given; ``None`` if it could be given more than two."""
    _, *parameters = inspect.signature(cast("type[nn.Module]", cls).forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) > 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.default is p.empty for p in parameters if p.kind is not p.VAR_KEYWORD)


def _codes(function: Callable[..., Any]) -> Iterator[types.CodeType]:
    """The code of *function*, of what is defined in it, and of what its decorators wrapped."""
    for part in (function, inspect.unwrap(function)):
        waiting = [part.__code__] if isinstance(part, types.FunctionType) else []
        for code in waiting:  # grows on the way
            yield code
            waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
