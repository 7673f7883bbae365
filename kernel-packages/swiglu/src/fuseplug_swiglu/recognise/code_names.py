"""The names in the code of a forward, which can do nothing that it does not name.

They exclude variants cheaply, before anything is run: a forward that never names ``clamp`` does not clamp.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fuseplug.reading import names, remembered


def names_in(value: object) -> Iterable[str]:
    """The names that identify an activation: a module without tensors, or a function that an attribute holds."""
    if isinstance(value, nn.Module):
        for attribute in vars(value).values():
            yield from names_in(attribute) if not isinstance(attribute, nn.Module) else ()
        yield from names(type(value).forward, type(value))
    elif isinstance(value, functools.partial):
        yield from names_in(value.func)
    elif isinstance(value, types.MethodType | types.FunctionType | types.BuiltinFunctionType):
        yield value.__name__
        yield from names(getattr(value, "__func__", value))


@remembered
def parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of *forward*, without the module."""
    return tuple(inspect.signature(forward).parameters)[1:]


@remembered
def required(forward: Callable[..., Any]) -> int | None:
    """How many arguments *forward* must be given; ``None`` if it could be given more than two."""
    _, *parameters = inspect.signature(forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) > 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.default is p.empty for p in parameters if p.kind is not p.VAR_KEYWORD)
