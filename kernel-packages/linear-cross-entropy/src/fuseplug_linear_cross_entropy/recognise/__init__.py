"""Finds the head of a model, and makes its logits lazy."""

from .structure import match

__all__ = ["match"]
