"""Calls Fuseplug after the import of a module that it wraps. Needs only modules that Python has at its start."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes milliseconds to import, in every Python that starts
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class OnImport:
    """A finder that finds no modules itself. It adds a step to the import of the modules that it waits for."""

    def __init__(self, names: Iterable[str]) -> None:
        self.waiting = set(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find an awaited module with the other finders. Its loader calls Fuseplug once, after the import."""
        if name not in self.waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader: Any = getattr(spec, "loader", None)
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the method of its class is in force again
            execute(module)
            self.imported(name, module)

        loader.exec_module = exec_module
        return spec

    def imported(self, name: str, module: ModuleType) -> None:
        """Hand *module* to Fuseplug."""
        self.waiting.discard(name)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            from fuseplug_tools.fusing.moments import wrap

            wrap(name, module)
        except Exception as error:
            if '"strict": true' in os.environ.get("FUSEPLUG_RUN", ""):
                raise
            sys.stderr.write(
                f"fuseplug run: process {os.getpid()} may train unfused, because {sys.executable} could not wrap "
                f"{name}: {type(error).__name__}: {error}\n"
            )


def start() -> None:
    """Wait for the modules that ``fuseplug run`` names, unless ``FUSEPLUG_AUTO=off``, or this was done before."""
    names = os.environ.get("FUSEPLUG_RUN_MODULES", "").split()
    off = os.environ.get("FUSEPLUG_AUTO", "").lower() in ("off", "0", "false", "no")
    if names and not off and not any(isinstance(finder, OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, OnImport(names))
