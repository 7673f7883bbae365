"""The table of limits, one row for each op whose documentation states some. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Limit = TypeVar("Limit", bound=Callable[..., None])

limits: dict[str, tuple[Callable[..., None], str]] = {}


class Broken(Exception):  # noqa: N818 - `check` turns it into an error
    """A limit is broken. Holds the argument, what was asked, what was found, and the source that says so."""


def limit(*names: str, page: str) -> Callable[[Limit], Limit]:
    """Decorate a function that checks, with `require`, the limits that an op's documentation sets for its arguments.

    The function gets all arguments by their names in the op's schema. It must not read values: it also runs on fake
    tensors, and on an NPU the values are not computed yet.

    Args:
        *names: The ops, without their overloads: ``"npu_swiglu"``, or ``"my_library::my_op"``.
        page: The page that documents the limits.
    """

    def register(function: Limit) -> Limit:
        for name in names:
            limits[name if "::" in name else f"npu::{name}"] = (function, page)
        return function

    return register


def require(holds: bool, argument: str, asked: str, found: object, source: str | None = None) -> None:
    """Require that *argument* is as *asked*, which is so if *holds*; *found* is what it is, as a value or in words.

    *source* is for a limit that the op's page does not state: repository, file and function.
    """
    if not holds:
        raise Broken(argument, asked, found, source)
