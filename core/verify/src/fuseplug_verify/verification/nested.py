"""The tensors that lie in tuples, lists and dicts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..torch_private import tree_leaves


def tensors(value: Any) -> list[Tensor]:
    """The tensors in *value*."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
