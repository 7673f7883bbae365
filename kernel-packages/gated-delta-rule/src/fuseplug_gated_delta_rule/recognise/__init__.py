"""Finds the gated delta rule of a module, says how it is called, and makes the examples on which it is tried."""

from .structure import match

__all__ = ["match"]
