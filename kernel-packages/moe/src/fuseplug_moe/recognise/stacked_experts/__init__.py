"""Experts whose weights are stacked in two tensors, the routing left to the model."""

from .adapters import StackedAdapter
from .structure import flattened, match

__all__ = ["StackedAdapter", "flattened", "match"]
