"""A tensor that is computed only when something needs its values."""

from .tensor import LazyTensor

__all__ = ["LazyTensor"]
