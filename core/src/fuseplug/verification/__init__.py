"""Accepting a kernel for a module: by what both do, never by what they are called."""

from .neutral import neutral
from .outcome import Subject
from .signature import Signatures
from .snapshot import Snapshot
from .twin import StandIns
from .verifier import Semantics, Verifier

__all__ = ["Semantics", "Signatures", "Snapshot", "StandIns", "Subject", "Verifier", "neutral"]
