"""Does this kernel compute what this PyTorch module computes? And for which calls?

>>> from fuseplug_verify import check, examine
>>> semantics = examine(module, candidate)  # doctest: +SKIP
>>> conditions = check(semantics, module, kernel, "cuda")  # doctest: +SKIP

Importing this imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import loaded  # noqa: F401 - first: it notes when this process began to import
from .data import Adapter, Candidate, Conditions, Example, Refusal, Semantics
from .process_lock import ProcessLock
from .rebind import called_functions, rebound

if TYPE_CHECKING:
    from .reading import constants, hazard, names, remembered
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

# Names whose modules import torch.
_HOMES = {
    "Call": ".watch",
    "Outcome": ".verification.outcome",
    "StandIns": ".verification.stand_ins",
    "Subject": ".subjects",
    "Tolerance": ".verification.comparing",
    "VerifiedCalls": ".watch",
    "Verifier": ".verification.verifier",
    "Watch": ".watch",
    "check": ".verification.verifier",
    "constants": ".reading",
    "examine": ".verification.verifier",
    "hazard": ".reading",
    "names": ".reading",
    "neutral": ".verification.neutral",
    "remembered": ".reading",
    "said_by": ".safe_access",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
