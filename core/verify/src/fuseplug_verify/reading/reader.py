"""Reads one function and everything that it reaches."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from ..rebind import all_codes
from .arguments import Arguments, bind, parameters
from .findings import Reading
from .libraries import home, is_readable, unwrapped
from .lookup import in_class, is_a
from .objects import attribute_of
from .source import tree_of
from .statements import Walk
from .values import ARGUMENT, Value, either, known, listed
from .walking import Following, Walking

Call: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments."""

_DEEPEST = 40
_TEXT = (str, type(None))
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MOST = 4000
"""How many calls are followed at most."""


def read(function: types.FunctionType, module: nn.Module | None = None, calls: Sequence[Call] = ()) -> Reading:
    """Read what *function* depends on, including everything that it calls except torch and Python.

    Args:
        function: A function; or, with *module*, a method of it, whose first parameter is the module.
        module: The module whose method it is. Its present state is read, and nothing is run.
        calls: The positional and keyword arguments of some calls, without the module. An argument that is a string or
            ``None`` in all of them, such as the key of an activation, is taken to be one of these values. Any other
            argument may have any value.
    """
    function = unwrapped(function)
    reader = Reader(home(function))
    bound = module is not None and not is_a(in_class(type(module), function.__name__), staticmethod)
    itself = (Value(object=module, path=(), fresh=False),) if bound else ()
    try:
        reader.function(function, Arguments(), _parameters(function, itself, calls))
    except RecursionError:
        reader.unread(f"{function.__qualname__}: it is too deep to follow")
    reader.finish(function, len(itself))
    return reader.reading


def _parameters(function: types.FunctionType, itself: tuple[Value, ...], calls: Sequence[Call]) -> dict[str, Value]:
    """What the parameters of *function* stand for."""
    every = parameters(function)
    values = {parameter.name: _parameter(parameter) for parameter in every}
    if len({(len(args), *sorted(named)) for args, named in calls}) == 1:
        positional = [_one_of(things) for things in zip(*(args for args, _ in calls), strict=True)]
        named = {name: _one_of([more[name] for _, more in calls]) for name in calls[0][1]}
        # A parameter that is not given has its default, because further keyword arguments have other names than the
        # parameters. A wrapper has the parameters of what it wraps.
        left_out = [*inspect.signature(function).parameters.values()][len(itself) + len(positional) :]
        named |= {p.name: known(p.default) for p in left_out if p.name not in named and is_a(p.default, _TEXT)}
        bound = bind(function, Arguments((*itself, *positional), named=named, others={None: ARGUMENT}))
        several = {parameter.name for parameter in every if parameter.kind in _SEVERAL}
        values |= {n: v for n, v in bound.items() if n in several or all(is_a(o.object, _TEXT) for o in v.each)}
    several_first = bool(every) and every[0].kind is inspect.Parameter.VAR_POSITIONAL
    if not itself or not every or (several_first and calls):
        return values
    return values | {every[0].name: listed((*itself, ARGUMENT), exact=False) if several_first else itself[0]}


def _one_of(things: Sequence[Any]) -> Value:
    plain = bool(things) and all(is_a(thing, _TEXT) for thing in things)
    return either(known(thing) for thing in things) if plain else ARGUMENT


def _parameter(parameter: inspect.Parameter) -> Value:
    """An unknown argument. If its default is a number or a string, the guard compares the argument at each call."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return listed((ARGUMENT,), exact=False)
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return Value(named={None: ARGUMENT})
    default = parameter.default
    if is_a(default, (bool, int, float, str)):
        return Value(fresh=False, argument=True)
    usable = callable(default) and default is not parameter.empty
    return either((ARGUMENT, known(default, fresh=False))) if usable else ARGUMENT


class Reader(Following):
    """Follows functions and modules."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._stack: list[types.CodeType] = []
        self._calls = 0

    def finish(self, function: types.FunctionType, skipped: int) -> None:
        """Complete the reading from what was read."""
        reading = self.reading
        for path in reading.calls:
            reading.methods.pop((path, "forward"), None)
        reading.codes = list(dict.fromkeys(code for read in reading.codes for code in all_codes(read)))
        reading.numbers = {float(number) for code in reading.codes for number in _numbers(code.co_consts)}
        if (tree := tree_of(function)) is not None:
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            reading.ignored = frozenset(p.name for p in parameters(function)[skipped:] if p.name not in used)

    def function(
        self, function: types.FunctionType, arguments: Arguments, bound: dict[str, Value] | None = None
    ) -> Value:
        """Follow a call of *function* with *arguments*, or with its parameters *bound* to values."""
        function = unwrapped(function)
        where = f"{home(function)}.{function.__qualname__}"
        tree = tree_of(function) if is_readable(function) else None
        self._calls += 1
        if tree is None:
            return self.unread(f"{where}: there is no source that compiles to its code")
        if function.__code__ in self._stack or len(self._stack) >= _DEEPEST or self._calls > _MOST:
            return self.unread(f"{where}: there are too many calls to follow")
        self.reading.codes.append(function.__code__)
        self._stack.append(function.__code__)
        try:
            return Walk(self, function, bind(function, arguments) if bound is None else bound).run(tree)
        finally:
            self._stack.pop()

    def module(self, walk: Walking, node: Any, value: Value, arguments: Arguments) -> Value:
        """Follow a call of a module."""
        module, before = value.object, self.inside
        if value.path is not None:
            self.reading.calls.setdefault(value.path, module)
            self.reading.reads.setdefault(value.path, module)  # an item of a list is named nowhere else
            self.inside = value.path
        elif not value.fresh:
            self.unread(f"it calls a module that is not below it: {type(module).__name__}")
        try:
            return self._forward(walk, node, value, arguments)
        finally:
            self.inside = before

    def _forward(self, walk: Walking, node: Any, value: Value, arguments: Arguments) -> Value:
        module = value.object
        name = "__call__" if in_class(type(module), "__call__") is not nn.Module.__call__ else "forward"
        results = []
        for method in attribute_of(walk, node, value, name).each:
            function, receiver = method.object, method.receiver
            if is_a(function, types.MethodType):
                receiver = value if function.__self__ is module else known(function.__self__, fresh=False)
                function = function.__func__
            if is_a(function, types.FunctionType):
                results.append(self.function(function, arguments.after(receiver) if receiver else arguments))
            else:
                results.append(
                    self.unread(f"{type(module).__module__}.{type(module).__qualname__}.{name} cannot be read")
                )
        return either(results)


def _numbers(constants: Any) -> Iterator[float]:
    for constant in constants:
        if isinstance(constant, tuple | frozenset):
            yield from _numbers(constant)
        elif isinstance(constant, int | float) and not isinstance(constant, bool) and abs(constant) < 1e300:
            yield constant
