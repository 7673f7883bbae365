"""Looks into the nested tuples, lists and dicts that torch functions take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(value: Any) -> Iterator[Any]:
    """All items inside *value*, or *value* itself, that are no tuples, lists or dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, tuple | list):
        yield value
        return
    for item in value:
        yield from leaves(item)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """*value* with *change* called on each of its leaves; a tuple of another class becomes a plain one."""
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    if not isinstance(value, tuple | list):
        return change(value)
    items = [mapped(change, item) for item in value]
    return items if isinstance(value, list) else tuple(items)
