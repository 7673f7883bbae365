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
    from .calls import VerifiedCalls
    from .reading import constants, hazard, names, remembered
    from .safe_access import all_below, attributes_of, children_of, class_name, said_by
    from .subjects import Subject
    from .verification.comparing import Tolerance, difference, excess
    from .verification.nested import tensors
    from .verification.neutral import neutral, random_state_kept
    from .verification.outcome import Handing, Outcome, run
    from .verification.snapshot import Snapshot
    from .verification.twin import StandIns
    from .verification.verifier import Verifier
    from .verifying import check, examine
    from .watch import ById, Call, Frozen, Route, Watch

__all__ = [
    "Adapter",
    "ById",
    "Call",
    "Candidate",
    "Conditions",
    "Example",
    "Frozen",
    "Handing",
    "Outcome",
    "ProcessLock",
    "Refusal",
    "Route",
    "Semantics",
    "Snapshot",
    "StandIns",
    "Subject",
    "Tolerance",
    "VerifiedCalls",
    "Verifier",
    "Watch",
    "all_below",
    "attributes_of",
    "called_functions",
    "check",
    "children_of",
    "class_name",
    "constants",
    "difference",
    "examine",
    "excess",
    "hazard",
    "names",
    "neutral",
    "random_state_kept",
    "rebound",
    "remembered",
    "run",
    "said_by",
    "tensors",
]

# Names whose modules import torch.
_HOMES = {
    "ById": ".watch",
    "Call": ".watch",
    "Frozen": ".watch",
    "Handing": ".verification.outcome",
    "Outcome": ".verification.outcome",
    "Route": ".watch",
    "Snapshot": ".verification.snapshot",
    "StandIns": ".verification.twin",
    "Subject": ".subjects",
    "Tolerance": ".verification.comparing",
    "VerifiedCalls": ".calls",
    "Verifier": ".verification.verifier",
    "Watch": ".watch",
    "all_below": ".safe_access",
    "attributes_of": ".safe_access",
    "check": ".verifying",
    "children_of": ".safe_access",
    "class_name": ".safe_access",
    "constants": ".reading",
    "difference": ".verification.comparing",
    "examine": ".verifying",
    "excess": ".verification.comparing",
    "hazard": ".reading",
    "names": ".reading",
    "neutral": ".verification.neutral",
    "random_state_kept": ".verification.neutral",
    "remembered": ".reading",
    "run": ".verification.outcome",
    "said_by": ".safe_access",
    "tensors": ".verification.nested",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
