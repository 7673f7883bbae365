"""Finds again what a guard compares: below a module, by way of no ``__getattr__``, or by its name elsewhere."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

Route = Sequence[Any]
"""As in `Watch`: steps with a name and the store where that is."""

_CONTENTS = (lambda contents: lambda: contents)(None).__code__
"""Gives what is in the one cell that it closes over."""


def at(owner: Any, route: Route) -> Any:
    """What is at *route* below *owner*.

    Raises:
        AttributeError, LookupError: If nothing is there.
    """
    for name, store in route:
        # Dynamo breaks the graph at object.__getattribute__, and traces what the original says: a plain attribute.
        if store == "plain" or (store == "object" and torch.compiler.is_compiling()):
            owner = getattr(owner, name)
        elif store == "object":
            owner = object.__getattribute__(owner, name)
        else:
            owner = owner.__dict__[store][name]
    return owner


def every(owner: Any, route: Route) -> list[Any]:
    """All that is at *route*, which may lead through lists of modules.

    Raises:
        AttributeError, LookupError: If nothing is there, or a list does not have as many items as it had.
    """
    for number, (name, count) in enumerate(route):
        if name == "*":
            items = at(owner, route[:number]).__dict__["_modules"].values()
            if len(items) != count:
                raise LookupError(f"there are {len(items)} modules where there were {count}")
            return [inner for item in items for inner in every(item, route[number + 1 :])]
    return [at(owner, route)]


def looked_up(space: Any, name: Any) -> Callable[[], Any]:
    """What looks up *name* in *space*, a cell or a mapping, and raises as that does if it is not there."""
    if isinstance(space, types.CellType):
        # Not space.cell_contents: Dynamo takes a cell that is an object for something else than one of a closure, and
        # raises where a function that it inlines closes over the same.
        return types.FunctionType(_CONTENTS, globals(), closure=(space,))
    if (module := _module_of(space, name)) is not None:
        return lambda: getattr(module, name)
    if isinstance(space, dict) and type(space) is not dict:
        # A registry of a model's own may make something new of what it holds.
        return lambda: dict.__getitem__(space, name)
    return lambda: space[name]


def is_absent(space: Any, name: Any) -> Callable[[Sequence[Any]], bool]:
    """What says whether *space* has no *name*, whatever it is called with."""
    if (module := _module_of(space, name)) is not None:
        return lambda _: not hasattr(module, name)
    if isinstance(space, dict) and type(space) is not dict:
        return lambda _: not dict.__contains__(space, name)
    return lambda _: name not in space


def equal_to(value: Any) -> Callable[[Any], Any]:
    """What compares with *value*, of a `Watch`, as it is to be compared: scalars and containers by value."""
    expected = value.value
    if not value.by_value:
        return same_as(expected)
    if expected is None or isinstance(expected, bool):
        return lambda current: current is expected
    return lambda current: current == expected


def same_as(expected: Any) -> Callable[[Any], bool]:
    """What tells *expected* from any other object; of a function also its code and defaults."""
    if not isinstance(expected, types.FunctionType):
        return lambda current: current is expected
    code, defaults, named = expected.__code__, expected.__defaults__, expected.__kwdefaults__
    # Reloading a module replaces these in the function that was there. Dynamo takes no tuple for the same as another.
    return lambda current: (
        current is expected
        and expected.__code__ is code
        and (torch.compiler.is_compiling() or (expected.__defaults__ is defaults and expected.__kwdefaults__ is named))
    )


def _module_of(space: Any, name: Any) -> types.ModuleType | None:
    """The Python module whose names *space* holds, if *name* can be read as an attribute of it.

    ``torch.compile`` reads an attribute alone, and of a dictionary every name. While it does so, the garbage collector
    may remove what it wrote there for an earlier program, and then it raises.
    """
    if type(space) is not dict or "__getattr__" in space or not (isinstance(name, str) and name.isidentifier()):
        return None
    module = sys.modules.get(str(space.get("__name__")))
    return module if type(module) is types.ModuleType and vars(module) is space else None
