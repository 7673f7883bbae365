"""Where a chunk scan is found in a module, how it is called, and on what examples it is tried."""

from .structure import match

__all__ = ["match"]
