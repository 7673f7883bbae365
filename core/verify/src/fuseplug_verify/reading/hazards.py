"""Tells whether something may be called just to see what it returns."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

from .calls import computes
from .libraries import is_wrapped
from .lookup import in_class
from .reader import read


def hazard(called: Any) -> str:
    """Say why *called* must not be called just to find out what it is; ``""`` if it only computes.

    This is for a kernel whose ``match`` calls a function or an activation of a model to find out what it computes. If
    the code has side effects, the match would cause them, although a match must change nothing. This function runs
    nothing.

    Args:
        called: A function, a method of an instance, a module or a partial, also one of torch or Python.
    """
    if isinstance(called, functools.partial):
        return hazard(called.func)
    function, owner = called, None
    if isinstance(called, nn.Module):
        call = in_class(type(called), "__call__")
        function, owner = (in_class(type(called), "forward") if call is nn.Module.__call__ else call), called
    elif isinstance(called, types.MethodType):
        function, owner = called.__func__, called.__self__ if isinstance(called.__self__, nn.Module) else None
    if not isinstance(function, types.FunctionType) or not is_wrapped(function):
        return (
            ""
            if computes(function, getattr(function, "__name__", ""))
            else f"the code of a {type(called).__name__} cannot be read"
        )
    reading = read(function, owner)
    if reading.side_effects:
        return f"it does more than compute: {reading.side_effects[0].text}"
    return f"what it depends on cannot be read: {reading.unread[0]}" if reading.unknown else ""
