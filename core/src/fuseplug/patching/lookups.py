"""Looks up what a guard compares: below a module, without ``__getattr__``, or by name in a namespace or cell."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

Route = Sequence[Any]
"""As in `Watch`: steps, each a name and the store that holds it."""

_CONTENTS = (lambda contents: lambda: contents)(None).__code__
"""The code of a function that returns the contents of the one cell it closes over."""


def at(owner: Any, route: Route) -> Any:
    """What is at *route* below *owner*.

    Raises:
        AttributeError, LookupError: If nothing is there.
    """
    for name, store in route:
        # Dynamo breaks the graph at object.__getattribute__, but traces a plain attribute access, as in the original.
        if store == "plain" or (store == "object" and torch.compiler.is_compiling()):
            owner = getattr(owner, name)
        elif store == "object":
            owner = object.__getattribute__(owner, name)
        else:
            owner = owner.__dict__[store][name]
    return owner


def every(owner: Any, route: Route) -> list[Any]:
    """Everything at *route*, which may lead through lists of modules.

    Raises:
        AttributeError, LookupError: If nothing is there, or the length of a list has changed.
    """
    for number, (name, count) in enumerate(route):
        if name == "*":
            items = at(owner, route[:number]).__dict__["_modules"].values()
            if len(items) != count:
                raise LookupError(f"there are {len(items)} modules where there were {count}")
            return [inner for item in items for inner in every(item, route[number + 1 :])]
    return [at(owner, route)]


def looked_up(space: Any, name: Any) -> Callable[[], Any]:
    """A function that looks up *name* in *space*, a cell or a mapping, and raises if *name* is missing."""
    if isinstance(space, types.CellType):
        # Not space.cell_contents: Dynamo does not recognise a cell object as a cell of a closure, and raises if a
        # function that it inlines closes over the same cell.
        return types.FunctionType(_CONTENTS, globals(), closure=(space,))
    if (module := _module_of(space, name)) is not None:
        return lambda: getattr(module, name)
    if isinstance(space, dict) and type(space) is not dict:
        # The __getitem__ of a model's own registry may make a new object from the entry.
        return lambda: dict.__getitem__(space, name)
    return lambda: space[name]


def is_absent(space: Any, name: Any) -> Callable[[Sequence[Any]], bool]:
    """A function that tells whether *space* lacks *name*. It ignores its argument."""
    if (module := _module_of(space, name)) is not None:
        return lambda _: not hasattr(module, name)
    if isinstance(space, dict) and type(space) is not dict:
        return lambda _: not dict.__contains__(space, name)
    return lambda _: name not in space


def equal_to(value: Any) -> Callable[[Any], Any]:
    """A function that compares with *value* of a `Watch`: scalars and containers by value, all else by identity."""
    expected = value.value
    if not value.by_value:
        return same_as(expected)
    if expected is None or isinstance(expected, bool):
        return lambda current: current is expected
    # A parameter may equal a number. It has a gradient all the same.
    return lambda current: type(current) is type(expected) and current == expected


def same_as(expected: Any) -> Callable[[Any], bool]:
    """A function that tells *expected* from any other object. Of a function, the code and defaults count, too."""
    if not isinstance(expected, types.FunctionType):
        return lambda current: current is expected
    code, defaults, named = expected.__code__, expected.__defaults__, expected.__kwdefaults__
    # Reloading a module replaces these within the same function. To Dynamo, no tuple is identical to another.
    return lambda current: (
        current is expected
        and expected.__code__ is code
        and (torch.compiler.is_compiling() or (expected.__defaults__ is defaults and expected.__kwdefaults__ is named))
    )


def _module_of(space: Any, name: Any) -> types.ModuleType | None:
    """The Python module whose names *space* holds, if *name* can be read as an attribute of the module.

    ``torch.compile`` reads a single attribute of a module, but every name of a dictionary. Meanwhile, the garbage
    collector may remove names that ``torch.compile`` wrote there for an earlier program, and then it raises.
    """
    if type(space) is not dict or "__getattr__" in space or not (isinstance(name, str) and name.isidentifier()):
        return None
    module = sys.modules.get(str(space.get("__name__")))
    return module if type(module) is types.ModuleType and vars(module) is space else None
