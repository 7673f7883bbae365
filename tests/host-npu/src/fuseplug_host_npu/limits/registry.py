"""The table of limits, one row for each op whose documentation has some. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Limit = TypeVar("Limit", bound=Callable[..., None])

limits: dict[str, tuple[Callable[..., None], str]] = {}


class Broken(Exception):  # noqa: N818 - `check` makes an error of it
    """What `require` found: the argument, what was asked, what was found, and the source that says so."""


def limit(*names: str, page: str) -> Callable[[Limit], Limit]:
    """Decorate a function that says, with `require`, what an op's documentation asks of its arguments.

    It is given the arguments by the names in the op's schema, all of them, and must not look at values: what it checks
    is checked on fake tensors too, and on an NPU values are not there yet.

    Args:
        *names: The ops, without their overloads: ``"npu_swiglu"``, or ``"my_library::my_op"``.
        page: Where it is documented.
    """

    def register(function: Limit) -> Limit:
        for name in names:
            limits[name if "::" in name else f"npu::{name}"] = (function, page)
        return function

    return register


def require(holds: bool, argument: str, asked: str, found: object, source: str | None = None) -> None:
    """Say that *argument* must be as *asked*, which it is if it *holds*; *found* is what it is: a value, or words.

    A limit that the op's page does not state has a *source*: repository, file and function.
    """
    if not holds:
        raise Broken(argument, asked, found, source)
