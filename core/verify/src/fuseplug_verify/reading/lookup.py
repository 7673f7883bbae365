"""Finds attributes without running any code of their owners."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

from .findings import MISSING

Memoised = functools._lru_cache_wrapper
"""The type of what ``functools.lru_cache`` and ``functools.cache`` return."""

_STORES = ("_parameters", "_buffers", "_modules")


def attribute(owner: Any, name: str) -> Any:
    """Return the attribute *name* of *owner*, or `MISSING`.

    Functions, properties and other descriptors are returned as they are in their class. Attributes that a
    ``__getattr__`` would return are not found, except through that of `torch.nn.Module`.

    Args:
        owner: A module, a class, or any object.
        name: The name of the attribute.
    """
    if is_a(owner, type):
        return in_class(owner, name)
    of_class = in_class(type(owner), name)
    if is_a(of_class, (types.MemberDescriptorType, property)):
        return of_class
    attributes = namespace(owner)
    if name in attributes:
        return attributes[name]
    if of_class is not MISSING:
        return of_class
    if is_a(owner, nn.Module):
        for store in _STORES:
            if name in attributes.get(store, ()):
                return attributes[store][name]
    return MISSING


def is_a(thing: Any, classes: Any) -> bool:
    """Return whether *thing* is of one of *classes*; ``isinstance`` would ask *thing* for its ``__class__``."""
    return issubclass(type(thing), classes)


def in_class(cls: type, name: str, after: type | None = None) -> Any:
    """Return *name* from the first class in the MRO of *cls* that has it; with *after*, from the MRO after it."""
    base = class_with(cls, name, after)
    return MISSING if base is None else type.__dict__["__dict__"].__get__(base)[name]


def class_with(cls: type, name: str, after: type | None = None) -> type | None:
    """Return the class in which `in_class` finds *name*; ``None`` if none has it."""
    bases: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
    following = bases[bases.index(after) + 1 :] if after in bases else bases
    return next((base for base in following if name in type.__dict__["__dict__"].__get__(base)), None)


def namespace(owner: Any) -> dict[str, Any]:
    """Return the attributes of *owner* itself, bypassing any ``__getattribute__`` or property; empty if it has none."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return attributes if is_a(attributes, dict) else {}


def answers_itself(owner: Any) -> bool:
    """Return whether *owner*, or its class, has code of its own that answers for attributes that are not there."""
    for name, default in (("__getattr__", nn.Module.__getattr__), ("__getattribute__", object.__getattribute__)):
        method = in_class(type(owner), name)
        if method is not MISSING and method is not default and method is not in_class(types.ModuleType, name):
            return True
    return is_a(owner, types.ModuleType) and "__getattr__" in namespace(owner)
