"""How rotary functions are recognised: where a module has one, how to call it, and which examples to try."""

from .structure import match

__all__ = ["match"]
