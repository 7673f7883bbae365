"""Sparse blocks that hold their experts in a list, one module each, and often do the routing themselves."""

from .adapters import BlockAdapter, SeamAdapter
from .structure import match

__all__ = ["BlockAdapter", "SeamAdapter", "match"]
