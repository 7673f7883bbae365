"""A tensor that is computed when something needs its values, and need not be computed if nothing does."""

from .tensor import LazyTensor

__all__ = ["LazyTensor"]
