"""What the code of a norm says: the names in it, and the numbers that are written there."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Hashable
from typing import NamedTuple


class Written(NamedTuple):
    """Names and numbers in the code of a forward, and of what that calls by name."""

    names: frozenset[str]
    numbers: tuple[float, ...]


@functools.lru_cache(maxsize=4096)
def written(cls: Hashable) -> Written:
    """Read the forward of *cls*."""
    names: set[str] = set()
    numbers: dict[float, None] = {}
    waiting, seen = [getattr(cls, "forward", None)], set()
    for function in waiting:  # grows on the way
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        code = inspect.unwrap(function).__code__
        names.update(code.co_names)
        numbers |= dict.fromkeys(value for value in code.co_consts if isinstance(value, float))
        if not function.__module__.startswith("torch."):
            waiting += [function.__globals__.get(name, getattr(cls, name, None)) for name in code.co_names]
    return Written(frozenset(names), tuple(numbers))
