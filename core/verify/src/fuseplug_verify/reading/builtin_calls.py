"""The functions of Python that the reader knows: what each returns and changes, given its arguments."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .arguments import Arguments
from .findings import MISSING
from .following import Walking
from .lookup import is_a
from .objects import LISTS, MAPPINGS, attribute_of, item_in, item_of
from .tables import MUTATES
from .values import NEVER, NOTHING, Value, either, is_tried, known, listed

_Call = Callable[[Walking, Any, Arguments], Value]
_READS = ("index", "count", "copy", "lower", "upper", "startswith", "endswith", "join", "split", "format", "strip")
_IS_SCRIPTING = torch.jit.is_scripting  # type: ignore[attr-defined]


def _getattr(walk: Walking, node: Any, arguments: Arguments) -> Value:
    owner, name = (arguments.at(0) or NOTHING), (arguments.at(1) or NOTHING)
    if not is_a(name.object, str):
        walk.unread(node, "which attribute is meant is not known")
        return NOTHING
    value, default = attribute_of(walk, node, owner, name.object), arguments.at(2)
    if default is None or owner.known:
        return default if default is not None and value is NEVER else value
    return either((value, default))


def _hasattr(walk: Walking, node: Any, arguments: Arguments) -> Value:
    _getattr(walk, node, Arguments(arguments.values[:2]))
    return NOTHING


def _effect(walk: Walking, node: Any, arguments: Arguments) -> Value:
    del arguments
    walk.note(walk.reader.reading.side_effects, node)
    return NOTHING


def _type(walk: Walking, _node: Any, arguments: Arguments) -> Value:
    del walk
    value = arguments.at(0) or NOTHING
    return known(type(value.object), fresh=False) if value.known else NOTHING


def _is(_walk: Walking, _node: Any, _arguments: Arguments) -> Value:
    return NOTHING  # kinds of arguments are compared at each call


def _number(walk: Walking, node: Any, arguments: Arguments) -> Value:
    for value in arguments.all:
        walk.opaque(node, value)
    return Value(tried=is_tried(arguments.all))


def _len(walk: Walking, node: Any, arguments: Arguments) -> Value:
    value = _number(walk, node, arguments)
    return Value(tried=value.tried or any(not option.known for option in (arguments.at(0) or NOTHING).each))


def _extreme(walk: Walking, node: Any, arguments: Arguments) -> Value:
    value = _number(walk, node, arguments)
    walk.reader.reading.clamps |= value.tried
    walk.sizes(arguments.all)
    return value


def _listed(walk: Walking, node: Any, arguments: Arguments) -> Value:
    """``list``, ``tuple``, ``set`` and ``reversed``: they give the items of their argument."""
    source = arguments.at(0)
    if source is None:
        return listed(())
    walk.opaque(node, source)
    if source.items is not None:
        return listed(source.items.values, exact=source.items.exact and len(source.items.values) < 2)
    return listed((item_of(walk, node, source, None),), exact=False)


def _zip(walk: Walking, node: Any, arguments: Arguments) -> Value:
    items = [item_of(walk, node, value, None) for value in arguments.values]
    return listed((listed(items),), exact=False)


def _enumerate(walk: Walking, node: Any, arguments: Arguments) -> Value:
    source = arguments.at(0) or NOTHING
    number = Value(tried=any(not option.known and option.items is None for option in source.each))
    return listed((listed((number, item_of(walk, node, source, None))),), exact=False)


def _range(walk: Walking, node: Any, arguments: Arguments) -> Value:
    return listed((_number(walk, node, arguments),), exact=False)


def _scripting(_walk: Walking, _node: Any, _arguments: Arguments) -> Value:
    return known(False)  # what is scripted is no longer Python, and is not read


_BY_FUNCTION: list[tuple[_Call, tuple[Any, ...]]] = [
    (_getattr, (getattr,)),
    (_hasattr, (hasattr,)),
    (_effect, (setattr, delattr, object.__setattr__, print, open, exec, eval, input, builtins.breakpoint, __import__)),
    (_type, (type,)),
    (_is, (isinstance, issubclass, callable)),
    (_len, (len,)),
    (_number, (abs, round, sum, any, all, pow, int, float, bool, str, slice, complex, math.prod)),
    (_extreme, (min, max)),
    (_listed, (list, tuple, set, reversed)),
    (_zip, (zip,)),
    (_enumerate, (enumerate,)),
    (_range, (range,)),
    (_scripting, (_IS_SCRIPTING,)),
]
BUILTINS: Mapping[int, _Call] = {id(function): handler for handler, functions in _BY_FUNCTION for function in functions}
"""By the ``id`` of the function: not everything that is called has a hash."""


def method_of_python(walk: Walking, node: Any, receiver: Value, name: str, arguments: Arguments) -> Value:
    """A call of the method *name* of a string or container, which was made in the call, or outlives it."""
    first = arguments.at(0) or NOTHING
    if name in MUTATES:
        return _changed(walk, node, receiver, name, arguments)
    if name in ("get", "__getitem__") and not is_a(receiver.object, nn.Module):
        default = arguments.at(1, "default") or known(None)
        look = item_in if is_a(receiver.object, (list, tuple, *MAPPINGS)) else item_of
        value = either(look(walk, node, receiver, index) for index in first.each)
        if name == "get" and receiver.named is None and value is not NEVER and receiver.known:
            return either((value, default)) if not first.known else value
        return value if name != "get" else either((value, default))
    if name in ("items", "values", "keys") and (receiver.items or receiver.named or is_a(receiver.object, _HOLDERS)):
        item = NOTHING if name == "keys" else _any_item(walk, node, receiver)
        return listed((listed((NOTHING, item)) if name == "items" else item,), exact=False)
    if name in _READS and not is_a(receiver.object, nn.Module):
        return _number(walk, node, arguments.after(receiver))
    walk.unread(node, f"what is called {name} is not known")
    return Value(tried=True, fresh=False)


_HOLDERS = (*MAPPINGS, *LISTS)


def _any_item(walk: Walking, node: Any, receiver: Value) -> Value:
    if is_a(receiver.object, LISTS):
        modules = receiver.object._modules.values()
        return either(item_of(walk, node, receiver, known(number)) for number in range(len(modules)))
    return item_of(walk, node, receiver, Value())


def _changed(walk: Walking, node: Any, receiver: Value, name: str, arguments: Arguments) -> Value:
    """A method that changes its owner."""
    if receiver.foreign:
        walk.note(walk.reader.reading.side_effects, node)
    elif receiver.items is not None and name in ("append", "add", "insert", "extend", "update"):
        for value in arguments.all:
            spread = name in ("extend", "update")
            receiver.items.add(item_of(walk, node, value, None) if spread else value)
    else:
        walk.unread(node, f"{name} changes what is not known")
    return Value(tried=True) if receiver.object is not MISSING else NOTHING
