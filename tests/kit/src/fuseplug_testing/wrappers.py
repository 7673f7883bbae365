"""Wrappers of functions, which pass on all positional and keyword arguments of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function that does the same as another one, in other circumstances."""


def within(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Around:
    """A wrapper that enters *context* around each call of a function."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with context():
                return function(*args, **kwargs)

        return call

    return around


def followed_by(function: Callable[..., Any], after: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that calls *function*, and returns the result of *after* on its result."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return after(function(*args, **kwargs))

    return call
