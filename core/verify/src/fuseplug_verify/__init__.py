"""Does this kernel compute what this PyTorch module computes? And for which calls?

>>> from fuseplug_verify import check, examine
>>> semantics = examine(module, candidate)  # doctest: +SKIP
>>> conditions = check(semantics, module, kernel, "cuda")  # doctest: +SKIP

Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import loaded  # noqa: F401 - first: it notes when this process began to import
from .data import Adapter, Candidate, Conditions, Example, Refusal, Semantics
from .process_lock import ProcessLock
from .rebind import called_functions, rebound
from .remembered import remembered

if TYPE_CHECKING:
    from .reading.hazards import hazard
    from .reading.naming import constants, names
    from .safe_access import said_by
    from .subjects import Subject
    from .verification.comparing import Tolerance
    from .verification.neutral import neutral
    from .verification.outcome import Outcome
    from .verification.stand_ins import StandIns
    from .verification.verifier import Verifier, check, examine
    from .watch import Call, VerifiedCalls, Watch

__all__ = [
    "Adapter",
    "Call",
    "Candidate",
    "Conditions",
    "Example",
    "Outcome",
    "ProcessLock",
    "Refusal",
    "Semantics",
    "StandIns",
    "Subject",
    "Tolerance",
    "VerifiedCalls",
    "Verifier",
    "Watch",
    "called_functions",
    "check",
    "constants",
    "examine",
    "hazard",
    "names",
    "neutral",
    "rebound",
    "remembered",
    "said_by",
]

# Names that are imported late, by module, because these modules import torch.
_LATE = {
    ".reading.hazards": ("hazard",),
    ".reading.naming": ("constants", "names"),
    ".safe_access": ("said_by",),
    ".subjects": ("Subject",),
    ".verification.comparing": ("Tolerance",),
    ".verification.neutral": ("neutral",),
    ".verification.outcome": ("Outcome",),
    ".verification.stand_ins": ("StandIns",),
    ".verification.verifier": ("Verifier", "check", "examine"),
    ".watch": ("Call", "VerifiedCalls", "Watch"),
}
_HOMES = {name: home for home, names in _LATE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
