"""The arguments of a call, and the parameters that take them."""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass, field, replace

from .lookup import is_a
from .values import Value, either, known, listed


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call.

    Attributes:
        values: The positional arguments.
        rest: An item of a ``*args`` whose length is not known; such items may follow *values*.
        named: The keyword arguments.
        others: Further arguments that ``**kwargs`` may bring, by name; ``None`` stands for names that are not known.
    """

    values: tuple[Value, ...] = ()
    rest: Value | None = None
    named: dict[str, Value] = field(default_factory=dict)
    others: dict[str | None, Value] = field(default_factory=dict)

    @property
    def all(self) -> list[Value]:
        """All arguments."""
        return [*self.values, *filter(None, [self.rest]), *self.named.values(), *self.others.values()]

    def after(self, *first: Value) -> Arguments:
        """The same arguments, with *first* put in front."""
        return replace(self, values=(*first, *self.values))

    def at(self, position: int, name: str = "") -> Value | None:
        """The argument at *position*, or the one called *name*."""
        return self.values[position] if position < len(self.values) else self.named.get(name)


def parameters(function: types.FunctionType) -> list[inspect.Parameter]:
    """The parameters of *function* itself, even if it claims another signature."""
    plain = types.FunctionType(function.__code__, {}, argdefs=function.__defaults__, closure=function.__closure__)
    plain.__kwdefaults__ = function.__kwdefaults__
    return [*inspect.signature(plain).parameters.values()]


def bind(function: types.FunctionType, arguments: Arguments) -> dict[str, Value]:
    """What each parameter of *function* stands for. An argument from ``**kwargs`` may also be left out."""
    bound: dict[str, Value] = {}
    values, named, others = list(arguments.values), dict(arguments.named), dict(arguments.others)
    for parameter in parameters(function):
        name, kind = parameter.name, parameter.kind
        if kind is kind.VAR_POSITIONAL:
            bound[name] = listed([*values, *filter(None, [arguments.rest])], exact=arguments.rest is None)
        elif kind is kind.VAR_KEYWORD:
            others.update(named)
            bound[name] = Value(named=others)
        elif kind is not kind.KEYWORD_ONLY and values:
            bound[name] = values.pop(0)
        elif name in named:
            bound[name] = named.pop(name)
        else:
            rest = None if kind is kind.KEYWORD_ONLY else arguments.rest
            bound[name] = either(filter(None, (rest, others.pop(name, others.get(None)), _default(parameter))))
    return bound


def _default(parameter: inspect.Parameter) -> Value | None:
    value = parameter.default
    # A default is made once and shared by all calls, so a default that can change does not belong to one call.
    fresh = is_a(value, (int, float, str, tuple, type(None)))
    return None if value is parameter.empty else known(value, fresh=fresh)
