"""Fused kernels for PyTorch models as plug-ins: found, verified, applied and taken off again.

>>> from fuseplug import manager
>>> applied = manager.apply_all(model)  # doctest: +SKIP
>>> print(applied.report)  # doctest: +SKIP
>>> applied.undo()  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fuseplug_verify import Adapter, Example, called_functions  # first: it notes when this process began to import

from .contract import Compute, Consent, Proposal, Rejection, Scope, Site, Target, Use
from .errors import (
    DiscoveryError,
    FuseplugError,
    PatchError,
    PlanError,
    RejectedError,
    SettingsError,
    UndoError,
    VerificationError,
)
from .hookspecs import BaseKernel, hookimpl
from .lazy import lazy

if TYPE_CHECKING:
    from .applications import Applied
    from .discovery.records import KernelRecord
    from .kernel_manager import KernelManager
    from .patching import Patch
    from .planning import Plan
    from .report import Entry, Report

    manager: KernelManager
    register_kernel = KernelManager().register

__all__ = [
    "Adapter",
    "Applied",
    "BaseKernel",
    "Compute",
    "Consent",
    "DiscoveryError",
    "Entry",
    "Example",
    "FuseplugError",
    "KernelManager",
    "KernelRecord",
    "Patch",
    "PatchError",
    "Plan",
    "PlanError",
    "Proposal",
    "RejectedError",
    "Rejection",
    "Report",
    "Scope",
    "SettingsError",
    "Site",
    "Target",
    "UndoError",
    "Use",
    "VerificationError",
    "called_functions",
    "hookimpl",
    "manager",
    "register_kernel",
]

__version__ = "0.1.0"

# Imported lazily, because the modules of these names import torch or read what is installed.
_imported, _names = lazy(
    __name__,
    {
        "Applied": ".applications",
        "Entry": ".report",
        "KernelManager": ".kernel_manager",
        "KernelRecord": ".discovery.records",
        "Patch": ".patching",
        "Plan": ".planning",
        "Report": ".report",
    },
)


def __getattr__(name: str) -> Any:
    if name == "manager":
        value: Any = _imported("KernelManager")()
    elif name == "register_kernel":
        value = (globals().get("manager") or __getattr__("manager")).register
    else:
        return _imported(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_names(), *__all__})
