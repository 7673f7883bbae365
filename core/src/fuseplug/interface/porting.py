"""How to port a kernel class that was written for the kernel interface of another project."""

from __future__ import annotations

import inspect
from typing import Any

from ..hookspecs import PROJECT, BaseKernel


def how_to_port(kernel: Any) -> str:
    """What to change in *kernel*, if it is a class written for LLaMA-Factory's interface; ``""`` if it is not."""
    theirs = _of_llama_factory(kernel) if inspect.isclass(kernel) else []
    if not theirs:
        return ""
    return (
        f"it is written for LLaMA-Factory's interface, with {' and '.join(theirs)}: "
        "derive it from fuseplug.BaseKernel, name kernel_id, op, device_types, function and reference, and instead of "
        "patching in apply() say in match() what is replaced (docs/write-a-kernel.md)"
    )


def _of_llama_factory(kernel: type) -> list[str]:
    """The attributes of *kernel* that only kernels of LLaMA-Factory have."""
    attributes = [name for name in ("_kernel_id", "_device") if _has_own(kernel, name)]
    if issubclass(kernel, BaseKernel) and _has_own(kernel, "apply"):
        attributes.append("an apply() of its own")
    return attributes


def _has_own(kernel: type, name: str) -> bool:
    """Whether *kernel* has an attribute *name* other than that of `fuseplug.interface.BaseKernel`."""
    # Compare the names of packages, because `fuseplug.interface` imports this module.
    homes = (base.__module__ for base in kernel.__mro__ if name in vars(base))
    return next(homes, PROJECT).partition(".")[0] != PROJECT
