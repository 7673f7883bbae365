"""The functional door of a package: which of its kernels computes for tensors on a device."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

import torch

from .hookspecs import BaseKernel


def module_for(device_type: str, kernels: tuple[type[BaseKernel], ...]) -> ModuleType:
    """The module of the function of the first of *kernels* that this machine can run on *device_type*.

    If there is none, that of their reference. ``torch.compile`` takes the choice for a constant.
    """
    return sys.modules[_name(device_type, kernels)]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name(device_type: str, kernels: tuple[type[BaseKernel], ...]) -> str:
    return _choose(device_type, kernels)


@functools.lru_cache(maxsize=256)
def _choose(device_type: str, kernels: tuple[type[BaseKernel], ...]) -> str:
    """The name of the module, which is imported."""
    able = (kernel.function for kernel in kernels if _can_run(kernel(), device_type))
    return importlib.import_module(next(able, kernels[0].reference).partition(":")[0]).__name__


def _can_run(kernel: BaseKernel, device_type: str) -> bool:
    return kernel.runs_on(device_type) and kernel.lacks(device_type) is None
