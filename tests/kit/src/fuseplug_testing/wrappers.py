"""Functions around others: they hand on whatever a call is given, by position and by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives a function that does the same as another, in other circumstances."""


def within(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Around:
    """Puts the entering of *context* around a function."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with context():
                return function(*args, **kwargs)

        return call

    return around


def followed_by(function: Callable[..., Any], after: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that gives what *after* makes of the result of *function*."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return after(function(*args, **kwargs))

    return call
