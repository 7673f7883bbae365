"""Accepting a kernel for a module: by what both do, never by what they are called."""

from .comparing import Tolerance, difference, excess
from .copying import UncopyableError
from .memory import dense
from .neutral import neutral, plain_torch, random_state_kept
from .outcome import Handing, Outcome, Subject, run
from .signature import Signatures
from .snapshot import Snapshot
from .twin import StandIns, own_tensors, twin
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
    "UncopyableError",
    "Verifier",
    "dense",
    "difference",
    "example_of",
    "excess",
    "neutral",
    "own_tensors",
    "plain_torch",
    "random_state_kept",
    "run",
    "twin",
]
