"""What lies in tuples, lists and dicts: what pytree does for these, in a tenth of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..torch_private import tree_leaves, tree_map

_SIMPLE = (Tensor, int, float, str, type(None))


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """*value*, with *change* applied to everything in it."""
    kind = type(value)
    if kind in (list, tuple):
        return kind([mapped(change, item) for item in value])
    if kind is dict:
        return {key: mapped(change, item) for key, item in value.items()}
    return change(value) if isinstance(value, _SIMPLE) else tree_map(change, value)


def leaves(value: Any) -> Iterator[Any]:
    """Everything in *value*."""
    if type(value) in (list, tuple):
        for item in value:
            yield from leaves(item)
    elif type(value) is dict:
        yield from leaves(list(value.values()))
    elif isinstance(value, _SIMPLE):
        yield value
    else:
        yield from tree_leaves(value)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in *value*."""
    return [each for each in leaves(value) if isinstance(each, Tensor)]
