"""The functions that the methods of a class look up as globals of their Python module, for recognisers."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from fuseplug import Target, called_functions
from fuseplug.reading import remembered

__all__ = ["looked_up", "methods_of", "positional_parameters"]


def looked_up(cls: type, wanted: Callable[[object], bool]) -> Iterator[tuple[Target, Any]]:
    """The *wanted* functions that methods of *cls* call by a global name, each with its target.

    Nothing is cached, because somebody may put another function in place of one.
    """
    for name, method in methods_of(cls).items():
        if isinstance(method, types.FunctionType):
            for called, function in called_functions(method, wanted).items():
                yield Target(name, called), function


def methods_of(cls: type) -> dict[str, Any]:
    """The methods of *cls* and of its bases outside torch by name, as their classes hold them."""
    methods: dict[str, Any] = {}
    for base in cls.__mro__:
        if not base.__module__.startswith("torch."):
            for name, value in vars(base).items():
                if isinstance(value, types.FunctionType | staticmethod | classmethod):
                    methods.setdefault(name, value)
    return methods


@remembered
def positional_parameters(function: types.FunctionType) -> tuple[str, ...]:
    """The names of the positional parameters of *function*, or of the function that its decorators wrap."""
    code: types.CodeType = inspect.unwrap(function).__code__
    return code.co_varnames[: code.co_argcount]
