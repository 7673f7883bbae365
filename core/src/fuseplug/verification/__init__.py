"""Accepting a kernel for a module: by what both do, never by what they are called."""

from .outcome import Subject
from .signature import Signatures
from .twin import StandIns, fingerprint, stand_in
from .verifier import Semantics, Verifier

__all__ = ["Semantics", "Signatures", "StandIns", "Subject", "Verifier", "fingerprint", "stand_in"]
