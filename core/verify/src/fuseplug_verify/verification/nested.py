"""Finds and changes what lies in tuples, lists and dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def leaves(value: Any) -> Iterator[Any]:
    """Everything in *value* that is not itself a tuple, list or dict. Outputs of transformers' models are dicts."""
    if issubclass(type(value), dict):
        value = list(value.values())
    if not _has_items(value):
        yield value
        return
    for item in value:
        yield from leaves(item)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in *value*."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """*value* with *change* called on each of its leaves; its tuples, lists and dicts are new, of the same classes."""
    if issubclass(type(value), dict):
        same_class = copy.copy(value)
        for key, item in value.items():
            same_class[key] = mapped(change, item)
        return same_class
    if not _has_items(value):
        return change(value)
    items = [mapped(change, item) for item in value]
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def with_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """*value* with *change* called on each of its tensors, as in `mapped`."""
    return mapped(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _has_items(value: Any) -> bool:
    return issubclass(type(value), tuple | list) and not issubclass(type(value), torch.Size)
