"""The state of the whole process, which a kernel must not change."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..torch_private import DYNAMO_SETTINGS, INDUCTOR_SETTINGS, import_dynamo
from .settings import of_python, of_torch

_LASTING = (
    "os.environ",
    "torch.get_num_threads()",
    "torch.get_float32_matmul_precision()",
    "torch.backends",
    "whether torch flushes denormal numbers",
    DYNAMO_SETTINGS,
)


def _lasts(setting: str) -> bool:
    return setting.startswith(_LASTING)


def _comes_late(setting: str) -> bool:
    """Whether *setting* exists only once something has imported the module that it belongs to."""
    return setting.startswith((DYNAMO_SETTINGS, INDUCTOR_SETTINGS, "numpy's"))


class ProcessState:
    """A snapshot of the process: its settings, random state, and what names in torch and in *owners* stand for.

    Args:
        owners: Classes and Python modules in which nobody may set anything, besides torch's own.
    """

    def __init__(self, owners: Iterable[type | types.ModuleType] = ()) -> None:
        import_dynamo()  # otherwise the first kernel that does would be blamed for replacing torch.manual_seed
        self._owners = (torch, torch.nn, torch.nn.functional, torch.Tensor, torch.nn.Module, *owners)
        self._environ = tuple(os.environ)
        self._settings = _settings()
        self._names = [dict(vars(owner)) for owner in self._owners]

    def changed(self) -> list[str]:
        """What has changed since, in words."""
        return self._settings_changed(bool) + self.lastingly_changed(settings=False)

    def lastingly_changed(self, *, settings: bool = True) -> list[str]:
        """As `changed`, without settings that a test runner, for example, may change for a while."""
        found = self._settings_changed(_lasts) if settings else []
        for owner, before in zip(self._owners, self._names, strict=True):
            after = vars(owner)
            found += [
                f"{owner.__name__}.{name} was replaced"
                for name, value in before.items()
                if not name.startswith("_") and name in after and after[name] is not value
            ]
            if isinstance(owner, type):
                found += [
                    f"{owner.__name__}.{name} was added"
                    for name in after.keys() - before.keys()
                    if not name.startswith("_")
                ]
        return found

    def _settings_changed(self, wanted: Callable[[str], bool]) -> list[str]:
        now = _settings(self._environ)
        return [
            f"{name} {_change(self._settings.get(name), value)}"
            for name, value in now.items()
            if wanted(name)
            and self._settings.get(name) != value
            and not (_comes_late(name) and name not in self._settings)
        ]


def _settings(environ: Iterable[str] = ()) -> dict[str, Any]:
    return of_python(environ) | of_torch(torch)


def owners_of(module: torch.nn.Module) -> list[type | types.ModuleType]:
    """The classes of *module* without torch's own, and the Python modules in which their methods look up names."""
    classes: list[type] = [cls for cls in type(module).__mro__ if cls not in (torch.nn.Module, object)]
    homes = [sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules]
    return [*classes, *dict.fromkeys(homes)]


def _change(before: object, now: object) -> str:
    texts = repr(before), repr(now)
    return "was changed" if max(map(len, texts)) >= 60 else f"was {texts[0]} and is {texts[1]}"
