"""Accepting a kernel for a module: by what both do, never by what they are called."""

from .comparing import Tolerance, difference, excess
from .neutral import neutral, random_state_kept
from .outcome import Handing, Outcome, Subject, run
from .signature import Signatures
from .snapshot import Snapshot
from .twin import StandIns, twin
from .verifier import SEMANTICS_SIZE, Semantics, Verifier, example_of

__all__ = [
    "SEMANTICS_SIZE",
    "Handing",
    "Outcome",
    "Semantics",
    "Signatures",
    "Snapshot",
    "StandIns",
    "Subject",
    "Tolerance",
    "Verifier",
    "difference",
    "example_of",
    "excess",
    "neutral",
    "random_state_kept",
    "run",
    "twin",
]
