"""Times kernels against originals in the calls that a model makes, to find the sizes from which on they gain."""

from .batches import Runs, batches_of, refuse_absent, runs_of
from .calls import sharing
from .kinds import Kind, Kinds, Task, measurer
from .turns import by_turns, spread

__all__ = [
    "Kind",
    "Kinds",
    "Runs",
    "Task",
    "batches_of",
    "by_turns",
    "measurer",
    "refuse_absent",
    "runs_of",
    "sharing",
    "spread",
]
