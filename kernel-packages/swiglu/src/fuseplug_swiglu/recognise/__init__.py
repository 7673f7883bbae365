"""Find gated MLPs in a model: which modules they are, how to call them, and the examples to try them on."""

from .structure import match

__all__ = ["match"]
