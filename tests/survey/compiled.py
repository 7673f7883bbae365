"""The kernels compute what is small eagerly; here they compile it too, so that what is compared is what is compiled."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import types
from collections.abc import Iterator

import transformers.models

from fuseplug import KernelManager
from fuseplug.inductor import InductorKernel


def compile_everything(manager: KernelManager) -> None:
    """Let every kernel of *manager* that has a size from which on it compiles do so from one element on."""
    for module, name in thresholds(manager):
        setattr(module, name, 1)


def thresholds(manager: KernelManager) -> Iterator[tuple[types.ModuleType, str]]:
    """The sizes from which on the Inductor kernels of *manager* compile: modules, and names in them."""
    for kernel in filter(None, (record.kernel for record in manager.kernels())):
        if isinstance(kernel, InductorKernel):
            module = importlib.import_module(kernel.function.partition(":")[0])
            found = [name for name in vars(module) if name.startswith("_LARGE")]
            assert found, kernel.kernel_id
            yield from ((module, name) for name in found)


def import_every_model() -> None:
    """Import all modeling files, of which each may register pytree nodes: with another number of these, what was
    compiled is compiled again.
    """
    for folder in pkgutil.iter_modules(transformers.models.__path__, "transformers.models."):
        for file in pkgutil.iter_modules(getattr(importlib.import_module(folder.name), "__path__", ())):
            if file.name.startswith("modeling_") and not file.name.startswith(("modeling_tf_", "modeling_flax_")):
                with contextlib.suppress(ImportError, RuntimeError):  # of what is not installed
                    importlib.import_module(f"{folder.name}.{file.name}")
