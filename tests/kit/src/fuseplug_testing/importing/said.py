"""The sentences about side effects of importing a kernel's module."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any


def prints(module: str, text: str) -> str:
    """The sentence that says that importing *module* prints *text*."""
    return f"importing {module} prints {text[:80]!r}"


def changed(module: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """The settings that differ, each with the sentence that says that importing *module* changed it."""
    return {
        name: f"importing {module} changes {name} for the whole process"
        for name, value in before.items()
        if name in after and not name.startswith("os.environ") and after[name] != value
    }


def writes_variable(module: str, name: str) -> str:
    """The sentence that says that importing *module* writes an environment variable."""
    return f"importing {module} writes the environment variable {name}"


def starts_thread(module: str) -> str:
    """The sentence that says that importing *module* starts a thread."""
    return f"importing {module} starts a thread"


class Names:
    """A snapshot of what the public names of torch stand for."""

    def __init__(self, torch: types.ModuleType) -> None:
        self._torch, self._had_compiler = torch, _has_compiler(torch)
        owners = (torch, torch.nn, torch.nn.functional, torch.Tensor, torch.nn.Module)
        self._names = [(owner, dict(vars(owner))) for owner in owners]

    def replaced(self, module: str) -> list[str]:
        """Say which of these names importing *module* replaced."""
        changes = []
        compiler_came = _has_compiler(self._torch) != self._had_compiler
        for owner, names in self._names:
            now = dict(vars(owner))
            replaced = [name for name, value in names.items() if now.get(name, value) is not value]
            if compiler_came:  # Dynamo itself replaces names, by functions of torch
                replaced = [name for name in replaced if not _is_of_torch(now[name])]
            # A new name in a class replaces an inherited one. A module gets new names as its submodules are imported.
            added = [name for name in now if name not in names] if isinstance(owner, type) else []
            for name in (*replaced, *added):
                if not name.startswith("_"):
                    changes.append(f"importing {module} replaces {owner.__name__}.{name}")
        return changes


def _has_compiler(torch: types.ModuleType) -> bool:
    # Not through torch_private, which imports torch: torch may not be imported yet, and must stay so.
    return "_dynamo" in vars(torch)


def _is_of_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", None)).partition(".")[0] == "torch"
