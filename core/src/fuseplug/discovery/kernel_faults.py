"""What keeps a class from being a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..hookspecs import NEWEST_API, BaseKernel


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value.count(":") == 1


def _are_sizes(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(type(size) is int and size > 0 for size in value)


_PATH = '"package.module:function"'

_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("kernel_id", "op"), (lambda name: isinstance(name, str) and name != "", "a non-empty string")),
    **dict.fromkeys(("function", "reference"), (_is_path, _PATH)),
    **dict.fromkeys(("recogniser", "specimens"), (lambda path: path == "" or _is_path(path), _PATH)),
    "device_types": (
        lambda types: isinstance(types, (tuple, list)) and all(isinstance(kind, str) for kind in types),
        "a tuple of strings",
    ),
    "differentiable": (lambda value: isinstance(value, bool), "True or False"),
    "when_traced": (lambda value: value in ("kernel", "original"), '"kernel" or "original"'),
    "priority": (lambda value: type(value) is int, "an int"),
    "check_sizes": (_are_sizes, "positive numbers, at least one"),
    "rehearsal": (
        lambda paths: isinstance(paths, Mapping) and all(map(_is_path, paths.values())),
        f"a mapping from device types to {_PATH}",
    ),
}
"""For each field: the test of its value, and the words that say what the value must be."""


def faults(kernel: Any) -> list[str]:
    """All faults that keep *kernel*, a class that claims to be a `BaseKernel`, from being one."""
    if not inspect.isclass(kernel) or not issubclass(kernel, BaseKernel):
        return [f"{kernel!r} is not a subclass of fuseplug.BaseKernel"]
    if wrong := _wrong_api(kernel.api):
        return [wrong]  # the rules for other fields may differ in another API
    wrongs = [
        f"{name} must be {expected}, not {getattr(kernel, name, None)!r}"
        for name, (is_right, expected) in _FIELDS.items()
        if not is_right(getattr(kernel, name, None))
    ]
    if kernel.propose is not BaseKernel.propose:
        wrongs.append("propose() is final: write match() instead")
    if kernel.match is BaseKernel.match and not kernel.recogniser:
        wrongs.append('nothing recognises modules: name a recogniser, "package.module:function", or write match()')
    return wrongs


def _wrong_api(api: Any) -> str:
    if type(api) is not int or api < 1:
        return f"api must be the version of the contract that the kernel was written for, 1 or later, not {api!r}"
    if api > NEWEST_API:
        return (
            f"it was written for API {api} of kernels, and this Fuseplug has API {NEWEST_API}: "
            "pip install --upgrade fuseplug, or install an older release of its distribution"
        )
    return ""
