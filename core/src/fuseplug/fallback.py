"""How the function of a kernel leaves a call to PyTorch, and when it is to leave small ones."""

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
    """What is known of the call of a kernel's function that runs.

    Attributes:
        declined: Whether the function left the call to its reference.
        small_declined: Whether a function declines what is too small to be worth a compiled program. In a model the
            guard has compared the size with `BaseKernel.gains_from`, or is not to.
    """

    declined = False
    small_declined = False


this_thread = _InThisThread()


def by_reference(compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Compute by the reference what a backend does not serve. In a model, the call then does not count as the kernel's.

    Args:
        compute: What the reference computes with.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        What *compute* returns.
    """
    result = compute(*args, **kwargs)
    if not torch.compiler.is_compiling():
        this_thread.declined = True  # only now: what was computed may have called another fused module
    return result


@contextlib.contextmanager
def declining_small(declining: bool = True) -> Iterator[None]:
    """Inside, functions decline what is too small to be worth a compiled program, or do not."""
    before, this_thread.small_declined = this_thread.small_declined, declining
    try:
        yield
    finally:
        this_thread.small_declined = before


def is_small_declined() -> bool:
    """Whether a function is to decline what is too small to be worth a compiled program: see `declining_small`."""
    return this_thread.small_declined
