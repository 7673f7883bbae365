"""What recognisers find in all modeling files of transformers."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import TypeVar

import transformers.models
from torch import nn

from fuseplug import Target

T = TypeVar("T")


def targets_beside(name: str, targets: Callable[[type], Iterable[tuple[Target, T]]]) -> dict[str, dict[str, T]]:
    """What *targets* finds in the classes of each modeling file that has *name*, by folder and by target."""
    by_folder = {}
    for folder in pkgutil.iter_modules(transformers.models.__path__):
        try:
            module = importlib.import_module(f"transformers.models.{folder.name}.modeling_{folder.name}")
        except ImportError:  # it needs something that is not installed, or does not exist
            continue
        if hasattr(module, name):
            classes = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, nn.Module)]
            by_folder[folder.name] = {str(target): value for cls in classes for target, value in targets(cls)}
    return by_folder
