"""Keeps a survey from compiling the same program again and again."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

import transformers.models


def import_every_model() -> None:
    """Import all modeling files, so that none is imported later.

    Each may register pytree nodes, and whenever their number changes, programs are compiled again.
    """
    for folder in pkgutil.iter_modules(transformers.models.__path__, "transformers.models."):
        for file in pkgutil.iter_modules(getattr(importlib.import_module(folder.name), "__path__", ())):
            if file.name.startswith("modeling_") and not file.name.startswith(("modeling_tf_", "modeling_flax_")):
                with contextlib.suppress(ImportError, RuntimeError):  # something that it needs is not installed
                    importlib.import_module(f"{folder.name}.{file.name}")
