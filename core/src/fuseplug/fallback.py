"""How the function of a kernel leaves a call to PyTorch, and when it must leave small calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

__all__ = ["by_reference", "declining_small", "is_small_declined", "this_thread"]

P = ParamSpec("P")
R = TypeVar("R")


class _InThisThread(threading.local):
    """The state of the call of a kernel's function that runs in this thread.

    Attributes:
        declined: Whether the function left the call to its reference.
        small_declined: Whether a function declines calls that are too small to be worth a compiled program. In a model
            it does not: the guard has compared the size with `BaseKernel.gains_from`, or must not compare it.
    """

    declined = False
    small_declined = False


this_thread = _InThisThread()


def by_reference(compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Compute with the reference what a backend does not serve. In a model, the call then counts as the original's.

    Args:
        compute: The function with which the reference computes.
        args: The arguments of *compute*.
        kwargs: The keyword arguments of *compute*.

    Returns:
        What *compute* returns.
    """
    result = compute(*args, **kwargs)
    if not torch.compiler.is_compiling():
        this_thread.declined = True  # set last, because *compute* may call another fused module
    return result


@contextlib.contextmanager
def declining_small(declining: bool = True) -> Iterator[None]:
    """Set whether functions, within the block, decline calls that are too small to be worth a compiled program."""
    before, this_thread.small_declined = this_thread.small_declined, declining
    try:
        yield
    finally:
        this_thread.small_declined = before


def is_small_declined() -> bool:
    """Whether functions must decline calls that are too small to be worth a compiled program (`declining_small`)."""
    return this_thread.small_declined
