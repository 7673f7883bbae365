"""What keeps a survey from compiling one program again and again."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

import transformers.models


def import_every_model() -> None:
    """Import all modeling files, of which each may register pytree nodes: with another number of these, what was
    compiled is compiled again.
    """
    for folder in pkgutil.iter_modules(transformers.models.__path__, "transformers.models."):
        for file in pkgutil.iter_modules(getattr(importlib.import_module(folder.name), "__path__", ())):
            if file.name.startswith("modeling_") and not file.name.startswith(("modeling_tf_", "modeling_flax_")):
                with contextlib.suppress(ImportError, RuntimeError):  # of what is not installed
                    importlib.import_module(f"{folder.name}.{file.name}")
