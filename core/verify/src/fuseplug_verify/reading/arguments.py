"""The arguments of a call, and the parameters that take them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .values import NOTHING, Value, either, known, listed


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call.

    Attributes:
        values: Those by position.
        rest: An item of a ``*args`` whose length is not known, which may follow *values*.
        named: Those by keyword.
        others: An item of a ``**kwargs`` whose keys are not known, which may add to *named*.
    """

    values: tuple[Value, ...] = ()
    rest: Value | None = None
    named: dict[str, Value] = field(default_factory=dict)
    others: Value | None = None

    @property
    def all(self) -> list[Value]:
        """All of them."""
        loose = [v for v in (self.rest, self.others) if v is not None]
        return [*self.values, *self.named.values(), *loose]

    @property
    def key(self) -> Any:
        """Equal where the same is known of the arguments."""
        named = tuple((name, v.key) for name, v in self.named.items())
        return tuple(v.key for v in self.values), self.rest and self.rest.key, named, self.others and self.others.key

    def after(self, *first: Value) -> Arguments:
        """The same arguments, with *first* put in front."""
        return replace(self, values=(*first, *self.values))

    def at(self, position: int, name: str = "") -> Value | None:
        """The argument at *position*, or of *name*."""
        if position < len(self.values):
            return self.values[position]
        return self.named.get(name)


@dataclass(frozen=True)
class Partial:
    """What ``functools.partial`` makes of *called* and the arguments *given*."""

    called: Value
    given: Arguments

    def with_more(self, more: Arguments) -> Arguments:
        """The arguments of a call that has *more*."""
        first, loose = self.given, self.given.rest or more.rest
        named = {**first.named, **more.named}
        return Arguments((*first.values, *more.values), loose, named, first.others or more.others)


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


def bind(function: types.FunctionType, given: Arguments) -> dict[str, Value]:
    """What each parameter of *function* stands for."""
    names = [name for name, kind in parameters(function) if kind == "positional"]
    defaults = function.__defaults__ or ()
    standing = dict(zip(names[len(names) - len(defaults) :], map(_default, defaults), strict=True))
    standing |= {name: _default(value) for name, value in (function.__kwdefaults__ or {}).items()}
    return place(list(parameters(function)), standing, given)


def place(taken: list[tuple[str, str]], defaults: dict[str, Value], given: Arguments) -> dict[str, Value]:
    """What each of the parameters *taken*, by name and kind, stands for."""
    found: dict[str, Value] = {}
    values, named = list(given.values), dict(given.named)
    for name, kind in taken:
        if kind == "*":
            more = [*values, *([given.rest] if given.rest is not None else [])]
            found[name] = listed(more, exact=given.rest is None)
        elif kind == "**":
            more = [*named.values(), *([given.others] if given.others is not None else [])]
            found[name] = replace(listed(more, exact=False), named=dict(named), others=given.others)
        elif kind == "positional" and values:
            found[name] = values.pop(0)
        elif name in named:
            found[name] = named.pop(name)
        else:
            loose = [given.rest if kind == "positional" else None, given.others, defaults.get(name)]
            maybe = [v for v in loose if v is not None]
            found[name] = either(maybe) if maybe else NOTHING
    return found


def _default(value: Any) -> Value:
    # A default is made once and shared by all calls, so a call does not own one that can change.
    return known(value, owned=isinstance(value, int | float | str | tuple | type(None)))
