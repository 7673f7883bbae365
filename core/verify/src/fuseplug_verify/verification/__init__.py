"""Decides whether a kernel may replace a module's code: by what both compute, never by their names."""

from .comparing import Tolerance, difference, excess
from .copying import UncopyableError
from .examples import SEMANTICS_SIZE, example_of
from .memory import dense
from .nested import tensors
from .neutral import neutral, plain_torch, random_state_kept
from .outcome import Handing, Outcome, Subject, run
from .signature import Signatures
from .snapshot import Snapshot
from .twin import StandIns, own_tensors, twin
from .verifier import Verifier

__all__ = [
    "SEMANTICS_SIZE",
    "Handing",
    "Outcome",
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
    "tensors",
    "twin",
]
