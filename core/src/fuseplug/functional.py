"""The public function of a package: checked by its reference, computed by a backend, or by the reference after all."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from .hookspecs import BaseKernel
from .torch_private import traced_away

__all__ = ["by_device", "by_reference", "computed_by"]

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


@contextlib.contextmanager
def declining_small(declining: bool = True) -> Iterator[None]:
    """Inside, functions decline what is too small to be worth a compiled program, or do not."""
    before, this_thread.small_declined = this_thread.small_declined, declining
    try:
        yield
    finally:
        this_thread.small_declined = before


def by_reference(compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Compute by the reference what a backend does not serve. In a model, the call then does not count as the kernel's.

    Args:
        compute: What the reference computes with.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    result = compute(*args, **kwargs)
    if not torch.compiler.is_compiling():
        this_thread.declined = True  # only now: what was computed may have called another fused module
    return result


def computed_by(compute: Callable[..., R], reference: Callable[P, R]) -> Callable[P, R]:
    """Make the function of a kernel.

    Args:
        compute: What the backend does with arguments that were checked. Its docstring becomes the function's.
        reference: The reference of the op. It checks its arguments, and takes what is to compute as ``compute=``.

    Returns:
        *reference* with *compute* in the place of its own computation.

    Raises:
        TypeError: If *reference* takes no ``compute``.
    """
    if "compute" not in inspect.signature(reference).parameters:
        raise TypeError(
            f"{reference.__module__}.{reference.__qualname__} takes no compute: give it a keyword parameter of that "
            "name, a function that it calls with the arguments once they are checked; by default its own computation"
        )
    function: Any = functools.partial(reference, compute=compute)  # type: ignore[arg-type]
    functools.update_wrapper(function, reference)
    function.__doc__ = compute.__doc__
    fused: Callable[P, R] = function
    return fused


def by_device(reference: Callable[P, R], kernels: tuple[type[BaseKernel], ...]) -> Callable[P, R]:
    """Make the public function of a package.

    Args:
        reference: The reference of the op, or of one beside it. Its first argument is a tensor.
        kernels: Those of the package, the preferred ones first. The module of each one's function has a function of
            the name of *reference*.

    Returns:
        *reference*, computed by the first of *kernels* that this machine can run on the device of the first argument;
        by *reference* itself if there is none. ``torch.compile`` takes the choice for a constant.
    """
    name, first = reference.__name__, next(iter(inspect.signature(reference).parameters))

    @functools.wraps(reference)
    def function(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get(first)
        if x is None:
            return reference(*args, **kwargs)  # which raises the TypeError
        fused = getattr(module_for(x.device.type, kernels), name)
        if torch.compiler.is_compiling():
            return fused(*args, **kwargs)
        with declining_small():
            return fused(*args, **kwargs)

    return function


def module_for(device_type: str, kernels: tuple[type[BaseKernel], ...]) -> ModuleType:
    """The module of the function of the first of *kernels* that this machine can run on *device_type*.

    If there is none, that of their reference.
    """
    return sys.modules[_name(device_type, kernels)]


@traced_away
def _name(device_type: str, kernels: tuple[type[BaseKernel], ...]) -> str:
    return _choose(device_type, kernels)


@functools.lru_cache(maxsize=256)
def _choose(device_type: str, kernels: tuple[type[BaseKernel], ...]) -> str:
    """The name of the module, which is imported."""
    able = (kernel.function for kernel in kernels if _can_run(kernel(), device_type))
    return importlib.import_module(next(able, kernels[0].reference).partition(":")[0]).__name__


def _can_run(kernel: BaseKernel, device_type: str) -> bool:
    return kernel.runs_on(device_type) and kernel.lacks(device_type) is None
