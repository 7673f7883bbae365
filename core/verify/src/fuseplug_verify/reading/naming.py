"""Lists the names and numbers in the code of a function: a cheap way to rule out variants before anything runs.

Only the contents of a code object itself are remembered. So no class is kept alive, and no answer is out of date after
``LlamaMLP.forward = …``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..rebind import all_codes
from ..remembered import remembered
from .libraries import is_library, layers
from .lookup import is_a


def names(function: Callable[..., Any], cls: type | None = None) -> dict[str, int]:
    """Return every name in the code of *function*, numbered by order of first mention.

    That includes the names in nested functions, in what its decorators wrap, in the functions that it names as globals,
    and in the methods of *cls* that it names. Functions of torch and of Python are listed by name only.

    Args:
        function: A function or a method. Any other callable has no names.
        cls: The class that it is a method of.
    """
    mentioned: dict[str, None] = {}
    for reached in _reached(function, cls):
        mentioned.update(dict.fromkeys(_names_and_numbers(reached.__code__)[0]))
    return {name: number for number, name in enumerate(mentioned)}


def constants(function: Callable[..., Any], cls: type | None = None) -> tuple[float, ...]:
    """Return the floating-point numbers that are written in the code of *function*, and in all that `names` looks at.

    Args:
        function: A function or a method.
        cls: The class that it is a method of.
    """
    written: dict[float, None] = {}
    for reached in _reached(function, cls):
        written.update(dict.fromkeys(_names_and_numbers(reached.__code__)[1]))
    return tuple(written)


@remembered
def _names_and_numbers(code: types.CodeType) -> tuple[list[str], list[float]]:
    codes = [*all_codes(code)]
    numbers = (value for inner in codes for value in inner.co_consts if isinstance(value, float))
    return [name for inner in codes for name in inner.co_names], [*numbers]


def _reached(function: Any, cls: type | None) -> Iterator[types.FunctionType]:
    waiting, seen = _layers(function), set()
    own_count = len(waiting)
    for number, layer in enumerate(waiting):  # the list grows meanwhile
        if layer in seen or (number >= own_count and is_library(layer)):
            continue
        seen.add(layer)
        yield layer
        for named in _named(layer, cls):
            waiting += _layers(named)


def _layers(function: Any) -> list[types.FunctionType]:
    return layers(function.__func__ if is_a(function, types.MethodType) else function)


def _named(function: types.FunctionType, cls: type | None) -> Iterator[Any]:
    """Yield what the code of *function* may call by name: globals and methods of *cls*, also through ``super()``."""
    if is_library(function):
        return
    spaces = [function.__globals__]
    for base in cls.__mro__ if cls is not None else ():
        if base is nn.Module:
            break
        spaces.append(vars(base))  # type: ignore[arg-type]
    for name in _names_and_numbers(function.__code__)[0]:
        yield from (space[name] for space in spaces if name in space)
