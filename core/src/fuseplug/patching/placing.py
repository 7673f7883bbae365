"""Binds the arguments of a call as Python does, however the caller wrote the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fuseplug_verify import Call


class Binding:
    """Finds the arguments of a call by name. ``torch.compile`` does not follow `inspect.Signature.bind`.

    Args:
        function: The function that is called.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = [*inspect.signature(function).parameters.values()]
        self.positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._required = [p.name for p in parameters if p.default is p.empty and "VAR" not in p.kind.name]
        self._takes_further = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The arguments by name, and further keyword arguments, for which there are no parameters.

        ``None`` if Python would refuse the call, or if more arguments come by position than there are named parameters.
        """
        if len(args) > len(self.positional):
            return None
        arguments = dict(zip(self.positional, args))  # noqa: B905 - there may be fewer arguments
        further = {}
        for name, value in kwargs.items():
            if name not in self._by_name:
                further[name] = value
            elif name in arguments:
                return None
            else:
                arguments[name] = value
        if (further and not self._takes_further) or any(name not in arguments for name in self._required):
            return None
        return {**self.defaults, **arguments}, further


class Placed(NamedTuple):
    """A call, in the form of a verified call.

    Attributes:
        number: The index of that verified call.
        values: Its arguments in the order of `Call.kinds`, the module first.
        named: The arguments to pass by name.
    """

    number: int
    values: Sequence[Any]
    named: Mapping[str, Any]


class Placing:
    """Finds the verified call that means the same as a given call.

    Args:
        original: The function that is called.
        calls: The ways of calling that were verified, the preferred ones first.
        extra: What becomes of further keyword arguments.
    """

    def __init__(self, original: Callable[..., Any], calls: Sequence[Call], extra: str) -> None:
        self._bind = Binding(original)
        self._calls = calls
        self._extra = extra

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Placed | None:
        """The verified call that means the same; ``None`` if there is none."""
        if (bound := self._bind(args, kwargs)) is None:
            return None
        arguments, further = bound
        if further and self._extra == "original":
            return None
        defaults = self._bind.defaults
        for number, call in enumerate(self._calls):
            wanted = (*self._bind.positional[: call.count], *call.names)
            others = [name for name in arguments if name not in wanted]
            if all(name in defaults and _same(arguments[name], defaults[name]) for name in others):
                values = [arguments[name] for name in wanted]
                named = {name: arguments[name] for name in call.names}
                return Placed(number, values, {**named, **further} if self._extra == "pass" else named)
        return None


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return type(value) is type(default) and isinstance(value, bool | int | float | str | tuple) and value == default
