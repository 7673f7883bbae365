"""The functions that the methods of a class look up as globals of their Python module, for recognisers."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fuseplug import Target, called_functions
from fuseplug.reading import remembered

__all__ = ["calls_by_name", "looked_up", "methods_of", "positional_parameters"]


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
def calls_by_name(method: Callable[..., Any]) -> Mapping[str, Sequence[ast.Call]]:
    """The calls in the source of *method* by the name of what is called; none if there is no source."""
    calls: dict[str, list[ast.Call]] = {}
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                calls.setdefault(node.func.id, []).append(node)
    return calls


@remembered
def positional_parameters(function: types.FunctionType) -> tuple[str, ...]:
    """The names of the positional parameters of *function*, or of the function that its decorators wrap."""
    code: types.CodeType = inspect.unwrap(function).__code__
    return code.co_varnames[: code.co_argcount]
