"""Decides whether a kernel may replace a module's code: by what both compute, never by their names."""

from .comparing import Tolerance, difference, excess
from .nested import tensors
from .neutral import neutral, random_state_kept
from .outcome import Handing, Outcome, Subject, run
from .snapshot import Snapshot
from .twin import StandIns
from .verifier import Verifier

__all__ = [
    "Handing",
    "Outcome",
    "Snapshot",
    "StandIns",
    "Subject",
    "Tolerance",
    "Verifier",
    "difference",
    "excess",
    "neutral",
    "random_state_kept",
    "run",
    "tensors",
]
