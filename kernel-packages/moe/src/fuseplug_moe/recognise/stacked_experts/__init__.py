"""Experts whose weights are stacked in two tensors, and whose routing the model does."""

from .adapters import StackedAdapter
from .structure import flattened, match

__all__ = ["StackedAdapter", "flattened", "match"]
