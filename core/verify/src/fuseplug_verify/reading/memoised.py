"""The answer of a memoised function, which is watched like any other constant of a Python module."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .arguments import parameters
from .findings import MISSING
from .lookup import is_a

_SCALARS = (bool, int, float, str, type(None))


class MemoisedAnswer(Mapping[str, Any]):
    """The answer of a memoised function, as a namespace with one name."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.name = f"{getattr(function, '__name__', 'it')}()"

    def __getitem__(self, name: str) -> Any:
        if name != self.name:
            raise KeyError(name)
        return self.function()

    def __iter__(self) -> Iterator[str]:
        return iter((self.name,))

    def __len__(self) -> int:
        return 1


answer_of = functools.lru_cache(maxsize=256)(MemoisedAnswer)
"""Returns the same object for the same function, so that equal guards stay equal."""


def answered(memoised: Any) -> Any:
    """The scalar that *memoised* returns without arguments, if it is cached, so that nothing runs; else `MISSING`."""
    function = memoised.__wrapped__
    if not memoised.cache_info().currsize or not is_a(function, types.FunctionType) or any(parameters(function)):
        return MISSING
    answer = memoised()
    return answer if type(answer) in _SCALARS else MISSING
