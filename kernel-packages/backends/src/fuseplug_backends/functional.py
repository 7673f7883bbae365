"""The public functions of a package: the reference checks the arguments, and a backend or the reference computes."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from fuseplug import BaseKernel
from fuseplug.fallback import by_reference, declining_small

from .torch_private import traced_away
from .tracing import is_transformed

__all__ = ["by_device", "computed_by"]

F = TypeVar("F", bound=Callable[..., Any])


def computed_by(compute: Callable[..., Any], reference: F) -> F:
    """Make the function of a kernel.

    Args:
        compute: The backend's computation, for checked arguments. Its docstring becomes the function's.
        reference: The reference of the op. It checks its arguments, and computes with its argument ``compute=``.

    Returns:
        *reference* with *compute* in place of its own computation; *reference* itself under `torch.func` and in
        forward mode, which no kernel needs to know.

    Raises:
        TypeError: If *reference* takes no ``compute``.
    """
    if "compute" not in inspect.signature(reference).parameters:
        raise TypeError(
            f"{reference.__module__}.{reference.__qualname__} takes no argument compute: add this keyword "
            "parameter, a function that it calls with the checked arguments; by default, its own computation"
        )

    @functools.wraps(reference)
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_transformed():
            return by_reference(reference, *args, **kwargs)
        return reference(*args, compute=compute, **kwargs)

    function.__doc__ = compute.__doc__
    return cast("F", function)


def by_device(reference: F, kernels: tuple[type[BaseKernel], ...]) -> F:
    """Make the public function of a package.

    Args:
        reference: The reference of the op, or of a related op. Its first argument is a tensor.
        kernels: The package's kernels, the preferred ones first. The module of each kernel's function has a function
            with the name of *reference*.

    Returns:
        *reference*, computed by the first of *kernels* that this machine can run on the device of the first argument;
        by *reference* itself if there is none. ``torch.compile`` treats the choice as a constant.
    """
    name, first = reference.__name__, next(iter(inspect.signature(reference).parameters))

    @functools.wraps(reference)
    def function(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get(first)
        if x is None:
            return reference(*args, **kwargs)  # which raises the TypeError
        fused = getattr(sys.modules[_name(x.device.type, kernels)], name)
        if torch.compiler.is_compiling():
            return fused(*args, **kwargs)
        with declining_small():
            return fused(*args, **kwargs)

    return cast("F", function)


@traced_away
def _name(device_type: str, kernels: tuple[type[BaseKernel], ...]) -> str:
    return _choose(device_type, kernels)


@functools.lru_cache(maxsize=256)
def _choose(device_type: str, kernels: tuple[type[BaseKernel], ...]) -> str:
    """Import the module of the first kernel that runs here, or else of the reference, and return its name."""
    able = (kernel.function for kernel in kernels if kernel().runs_on(device_type) and not kernel().lacks(device_type))
    return importlib.import_module(next(able, kernels[0].reference).partition(":")[0]).__name__
