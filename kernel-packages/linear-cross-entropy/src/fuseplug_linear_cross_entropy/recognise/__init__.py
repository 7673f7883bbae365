"""Where the head of a model is found, and what becomes of its logits."""

from .structure import match

__all__ = ["match"]
