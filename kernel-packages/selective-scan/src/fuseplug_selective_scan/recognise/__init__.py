"""Finds the selective scans of a module, and says how to call them and with which examples to try them."""

from .structure import match

__all__ = ["match"]
