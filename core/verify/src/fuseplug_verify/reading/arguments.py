"""The arguments of a call, and the parameters that take them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .lookup import is_a
from .values import Value, either, known, listed


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call.

    Attributes:
        values: Those by position.
        rest: An item of a ``*args`` whose length is not known, which may follow *values*.
        named: Those by keyword.
        others: What ``**kwargs`` may bring besides, by name; ``None`` stands for names that are not known.
    """

    values: tuple[Value, ...] = ()
    rest: Value | None = None
    named: dict[str, Value] = field(default_factory=dict)
    others: dict[str | None, Value] = field(default_factory=dict)

    @property
    def all(self) -> list[Value]:
        """All of them."""
        return [*self.values, *filter(None, [self.rest]), *self.named.values(), *self.others.values()]

    def after(self, *first: Value) -> Arguments:
        """The same arguments, with *first* put in front."""
        return replace(self, values=(*first, *self.values))

    def at(self, position: int, name: str = "") -> Value | None:
        """The argument at *position*, or of *name*."""
        return self.values[position] if position < len(self.values) else self.named.get(name)


def parameters(function: types.FunctionType) -> Iterator[tuple[str, str]]:
    """The parameters of *function* itself: name and ``"positional"``, ``"keyword"``, ``"*"`` or ``"**"``."""
    code = function.__code__
    names, positional, keyword = code.co_varnames, code.co_argcount, code.co_kwonlyargcount
    yield from ((name, "positional") for name in names[:positional])
    yield from ((name, "keyword") for name in names[positional : positional + keyword])
    more = positional + keyword
    if code.co_flags & inspect.CO_VARARGS:
        yield names[more], "*"
        more += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        yield names[more], "**"


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """The defaults of the parameters of *function* itself, by name."""
    names = [name for name, kind in parameters(function) if kind == "positional"]
    positional = function.__defaults__ or ()
    return dict(zip(names[len(names) - len(positional) :], positional, strict=True)) | (function.__kwdefaults__ or {})


def bind(function: types.FunctionType, arguments: Arguments) -> dict[str, Value]:
    """What each parameter of *function* stands for. What ``**kwargs`` bring may also be left out."""
    defaults = defaults_of(function)
    bound: dict[str, Value] = {}
    values, named, others = list(arguments.values), dict(arguments.named), dict(arguments.others)
    for name, kind in parameters(function):
        if kind == "*":
            bound[name] = listed([*values, *filter(None, [arguments.rest])], exact=arguments.rest is None)
        elif kind == "**":
            others.update(named)
            bound[name] = Value(named=others)
        elif kind == "positional" and values:
            bound[name] = values.pop(0)
        elif name in named:
            bound[name] = named.pop(name)
        else:
            rest = arguments.rest if kind == "positional" else None
            possible = [
                rest,
                others.pop(name, others.get(None)),
                _default(defaults[name]) if name in defaults else None,
            ]
            bound[name] = either(filter(None, possible))
    return bound


def _default(value: Any) -> Value:
    # A default is made once and shared by all calls, so a call does not own one that can change.
    return known(value, fresh=is_a(value, (int, float, str, tuple, type(None))))
