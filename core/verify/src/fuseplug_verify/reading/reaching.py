"""Whether a function can be read, beneath its decorators."""

from __future__ import annotations

import types
from typing import Any

from .libraries import is_readable, wrapped_by
from .lookup import is_a


def is_wrapped(function: Any) -> bool:
    """Say whether *function*, or what its decorators wrap, can be read."""
    while is_a(function, types.FunctionType):
        if is_readable(function):
            return True
        function = wrapped_by(function)
    return False
