"""The kernels compute what is small eagerly; here they compile it too, so that what is compared is what is compiled."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

import transformers.models

from fuseplug.inductor import compiled


def compile_everything() -> None:
    """Let the kernels of Inductor compile for what is small, too."""
    compiled.SMALL = 1


def import_every_model() -> None:
    """Import all modeling files, of which each may register pytree nodes: with another number of these, what was
    compiled is compiled again.
    """
    for folder in pkgutil.iter_modules(transformers.models.__path__, "transformers.models."):
        for file in pkgutil.iter_modules(getattr(importlib.import_module(folder.name), "__path__", ())):
            if file.name.startswith("modeling_") and not file.name.startswith(("modeling_tf_", "modeling_flax_")):
                with contextlib.suppress(ImportError, RuntimeError):  # of what is not installed
                    importlib.import_module(f"{folder.name}.{file.name}")
