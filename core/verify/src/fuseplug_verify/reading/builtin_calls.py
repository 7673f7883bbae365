"""The functions of Python that the reader knows: what each returns and changes, given its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .arguments import Arguments
from .lookup import is_a
from .objects import MAPPINGS, attribute_of, item_in, item_of
from .tables import MUTATES
from .values import NEVER, NOTHING, Value, either, is_tried, known, listed
from .walking import Walking

_Call = Callable[[Walking, Any, Arguments], Value]


def _getattr(walk: Walking, node: Any, arguments: Arguments) -> Value:
    owner, name = (arguments.at(0) or NOTHING), (arguments.at(1) or NOTHING)
    if not is_a(name.object, str):
        return walk.unread(node, "which attribute is meant is not known")
    value, default = attribute_of(walk, node, owner, name.object), arguments.at(2)
    if default is None or owner.known:
        return default if default is not None and value is NEVER else value
    return either((value, default))


def _hasattr(walk: Walking, node: Any, arguments: Arguments) -> Value:
    _getattr(walk, node, Arguments(arguments.values[:2]))
    return NOTHING


def _effect(walk: Walking, node: Any, _arguments: Arguments) -> Value:
    walk.note(walk.reader.reading.side_effects, node)
    return NOTHING


def _number(walk: Walking, node: Any, arguments: Arguments) -> Value:
    for value in arguments.all:
        walk.opaque(node, value)
    return Value(tried=is_tried(arguments.all))


def _len(walk: Walking, node: Any, arguments: Arguments) -> Value:
    value = _number(walk, node, arguments)
    return Value(tried=value.tried or any(not option.known for option in (arguments.at(0) or NOTHING).each))


def _zip(walk: Walking, node: Any, arguments: Arguments) -> Value:
    return listed((listed([item_of(walk, node, value, None) for value in arguments.values]),), exact=False)


def _enumerate(walk: Walking, node: Any, arguments: Arguments) -> Value:
    source = arguments.at(0) or NOTHING
    number = Value(tried=any(not option.known and option.items is None for option in source.each))
    return listed((listed((number, item_of(walk, node, source, None))),), exact=False)


def _collected(walk: Walking, node: Any, arguments: Arguments) -> Value:
    return listed((item_of(walk, node, arguments.at(0) or NOTHING, None),), exact=False)


def _range(walk: Walking, node: Any, arguments: Arguments) -> Value:
    return listed((_number(walk, node, arguments),), exact=False)


_BY_FUNCTION: list[tuple[_Call, tuple[Any, ...]]] = [
    (_getattr, (getattr,)),
    (_hasattr, (hasattr,)),
    (_effect, (setattr, delattr, print, __import__)),
    (lambda *_: NOTHING, (isinstance, issubclass, callable)),  # the guard compares the kinds of arguments at each call
    (_len, (len,)),
    (_number, (abs, round, sum, any, all, pow, int, float, bool, str, slice, complex, math.prod)),
    (_zip, (zip,)),
    (_enumerate, (enumerate,)),
    (_collected, (tuple, list)),
    (_range, (range,)),
    # Scripted code is no longer Python, and is not read.
    (lambda *_: known(False), (torch.jit.is_scripting,)),  # type: ignore[attr-defined]
]
BUILTINS: Mapping[int, _Call] = {id(function): handler for handler, functions in _BY_FUNCTION for function in functions}
"""Handlers by the ``id`` of the function, because not everything that is called has a hash."""


def method_of_python(walk: Walking, node: Any, receiver: Value, name: str, arguments: Arguments) -> Value:
    """Follow a call of the method *name* of a string or container, whether made in the call or outliving it."""
    if name in MUTATES and receiver.foreign:
        walk.note(walk.reader.reading.side_effects, node)
        return Value(tried=True)
    first = arguments.at(0)
    if name == "append" and receiver.items is not None and first is not None and first.items is not receiver.items:
        receiver.items.add(first)
        return known(None)
    if name in ("get", "__getitem__") and not is_a(receiver.object, nn.Module):
        first = first or NOTHING
        look = item_in if is_a(receiver.object, (list, tuple, *MAPPINGS)) else item_of
        value = either(look(walk, node, receiver, index) for index in first.each)
        if name == "__getitem__" or (value is not NEVER and receiver.known and first.known):
            return value
        return either((value, arguments.at(1, "default") or known(None)))
    return walk.unread(node, f"it is not known which {name} is called")
