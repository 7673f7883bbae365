"""Imports public names when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy"]


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: The ``__name__`` of the package.
        homes: The module of each public name, relative to the package: ``".functional"``.

    Returns:
        Two functions, for ``__getattr__, __dir__ = lazy(__name__, {...})``. The first imports the module of a name
        and stores the value in the package; it raises `AttributeError` for names that are not in *homes*.

    Raises:
        ValueError: If a name equals that of its module, which takes the name in the package once it is imported.
    """
    for name, home in homes.items():
        if home == f".{name}":
            raise ValueError(f"{package}.{name} would be the module {package}{home} once that is imported: rename it")

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names
