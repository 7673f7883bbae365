"""Binds the arguments of a call as Python does, however the caller wrote the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fuseplug_verify import Call


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
        parameters = [*inspect.signature(original).parameters.values()]
        self._bind = binding(original)
        self._calls = calls
        self._extra = extra
        self._defaults = {p.name: p.default for p in parameters}
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Placed | None:
        """The verified call that means the same; ``None`` if there is none."""
        try:
            given, rest, further = self._bind(*args, **kwargs)
        except TypeError:  # The original says better what is wrong.
            return None
        if rest or (further and self._extra == "original"):
            return None
        for number, call in enumerate(self._calls):
            wanted = (*self._positional[: call.count], *call.names)
            if all(_same(given[name], self._defaults[name]) for name in given if name not in wanted):
                values = [given[name] for name in wanted]
                named = {name: given[name] for name in call.names}
                return Placed(number, values, {**named, **further} if self._extra == "pass" else named)
        return None


def binding(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the parameters of *function* that returns what it is given: by name, by position, by other names.

    It is generated as Python code, because ``torch.compile`` does not follow `inspect.Signature.bind`.
    """
    parameters = [*inspect.signature(function).parameters.values()]
    constants = {f"d{number}": p.default for number, p in enumerate(parameters) if p.default is not p.empty}
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    further = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    named = ", ".join(f"{p.name!r}: {p.name}" for p in parameters if p.name not in (rest, further))
    code = f"def bind({', '.join(_parameter_list(parameters))}): return {{{named}}}, {rest or '()'}, {further or '{}'}"
    exec(compile(code, "<binding of a call>", "exec"), constants)  # noqa: S102 - names of parameters, nothing else
    bind: Callable[..., Any] = constants["bind"]
    return bind


def _parameter_list(parameters: Sequence[inspect.Parameter]) -> Iterator[str]:
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    before: Any = None
    for number, p in enumerate(parameters):
        if before is p.POSITIONAL_ONLY and p.kind is not p.POSITIONAL_ONLY:
            yield "/"
        if p.kind is p.KEYWORD_ONLY and before not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
            yield "*"
        yield f"{stars.get(p.kind, '')}{p.name}" + ("" if p.default is p.empty else f"=d{number}")
        before = p.kind
    if before is inspect.Parameter.POSITIONAL_ONLY:
        yield "/"


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return type(value) is type(default) and isinstance(value, bool | int | float | str | tuple) and value == default
