"""The kernels compute what is small eagerly; here they compile it too, so that what is compared is what is compiled."""

from __future__ import annotations

import importlib

from fuseplug import KernelManager


def compile_everything(manager: KernelManager) -> None:
    """Let every kernel of *manager* that has a size from which on it compiles do so from one element on."""
    for kernel in filter(None, (record.kernel for record in manager.kernels())):
        if record_is_compiled(kernel.function):
            module = importlib.import_module(kernel.function.partition(":")[0])
            for name in [name for name in vars(module) if name.startswith("_LARGE")]:
                setattr(module, name, 1)


def record_is_compiled(function: str) -> bool:
    return ".inductor" in function
