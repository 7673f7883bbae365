"""What keeps a class from being a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..hookspecs import NEWEST_API, BaseKernel


def faults(kernel: Any) -> list[str]:
    """Everything that keeps *kernel*, a class that claims to be a `BaseKernel`, from being one."""
    if not inspect.isclass(kernel) or not issubclass(kernel, BaseKernel):
        return [f"{kernel!r} is not a subclass of fuseplug.BaseKernel"]
    if wrong := _wrong_api(kernel.api):
        return [wrong]  # what else is wrong by today's rules is of no interest
    found = [
        f"{name} must be a non-empty string, not {getattr(kernel, name, None)!r}"
        for name in ("kernel_id", "op", "function", "reference")
        if not (isinstance(getattr(kernel, name, None), str) and getattr(kernel, name))
    ]
    found += [
        f'{name} must be "package.module:function", not {said!r}'
        for name in ("function", "reference", "recogniser", "specimens")
        if isinstance(said := getattr(kernel, name, None), str)
        and said.count(":") != 1
        and said != getattr(BaseKernel, name, None)
    ]
    if not isinstance(kernel.device_types, (tuple, list)) or not all(isinstance(d, str) for d in kernel.device_types):
        found.append(f"device_types must be a tuple of strings, not {kernel.device_types!r}")
    is_bool = isinstance(kernel.differentiable, bool)
    found += [] if is_bool else [f"differentiable must be True or False, not {kernel.differentiable!r}"]
    if kernel.when_traced not in ("kernel", "original"):
        found.append(f'when_traced must be "kernel" or "original", not {kernel.when_traced!r}')
    if isinstance(kernel.priority, bool) or not isinstance(kernel.priority, int):
        found.append(f"priority must be an int, not {kernel.priority!r}")
    sizes = kernel.check_sizes
    if not isinstance(sizes, (tuple, list)) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        found.append(f"check_sizes must be positive numbers, at least one, not {sizes!r}")
    found += _wrong_rehearsal(kernel.rehearsal)
    if kernel.propose is not BaseKernel.propose:
        found.append("propose() is final: write match() instead")
    if kernel.match is BaseKernel.match and not kernel.recogniser:
        found.append('nothing recognises modules: name a recogniser, "package.module:function", or write match()')
    return found


def _wrong_rehearsal(said: Any) -> list[str]:
    if isinstance(said, Mapping) and all(isinstance(path, str) and path.count(":") == 1 for path in said.values()):
        return []
    return [f'rehearsal must be a mapping from device types to "package.module:function", not {said!r}']


def _wrong_api(api: Any) -> str:
    if type(api) is not int or api < 1:
        return f"api must be the number of the contract that it was written for, 1 or later, not {api!r}"
    if api > NEWEST_API:
        return (
            f"it was written for API {api} of kernels, and this Fuseplug has API {NEWEST_API}: "
            "pip install --upgrade fuseplug, or install an older release of its distribution"
        )
    return ""
