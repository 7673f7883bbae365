"""The functions of Python that the reader knows: what each returns and changes, given its arguments."""

from __future__ import annotations

import builtins
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .arguments import Arguments, Partial
from .attributes import attribute_of, item_of
from .following import Walking
from .lookup import is_a
from .settled import IS_SCRIPTING, IS_TRACING
from .values import NOTHING, Value, either, kinds_of, known, listed

_Call = Callable[[Walking, Any, Arguments], Value]


def _getattr(walk: Walking, node: Any, given: Arguments) -> Value:
    owner, name, default = given.at(0) or NOTHING, given.at(1) or NOTHING, given.at(2)
    if not is_a(name.object, str):
        if owner.foreign or owner.given:
            walk.unread(node, "which attribute is meant is not known")
        return Value(owner.kinds | name.kinds, owned=owner.owned, given=owner.given)
    found = attribute_of(walk.reader, owner, name.object, walk.where(node))
    if default is None:
        return found
    if all(each.name == "never" for each in found.each):
        kinds = found.kinds | default.kinds
        return Value(
            kinds, object=default.object, owned=default.owned, items=default.items, made=default.made, path=default.path
        )
    return found if owner.known or owner.made else either((found, default))


def _hasattr(walk: Walking, node: Any, given: Arguments) -> Value:
    found = _getattr(walk, node, Arguments(given.values[:2]))
    return Value(frozenset({"state"}) if found.path is not None else frozenset({"presence"}))


def _setattr(walk: Walking, node: Any, given: Arguments) -> Value:
    if any(not each.owned for each in (given.at(0) or NOTHING).each):
        walk.note(walk.reader.found.side_effects, node)
    return known(None)


def _effect(walk: Walking, node: Any, given: Arguments) -> Value:
    walk.note(walk.reader.found.side_effects, node)
    walk.escapes(node, given)
    return NOTHING


def _everything(walk: Walking, node: Any, given: Arguments) -> Value:
    first = given.at(0)
    if first is None or first.foreign or first.given:
        walk.unread(node, "everything is looked at")
    return NOTHING


def _type(_walk: Walking, _node: Any, given: Arguments) -> Value:
    first = given.at(0) or NOTHING
    if first.known or first.made:
        return known(first.made or type(first.object), owned=False)
    return Value(frozenset({"presence"}) if first.kinds else frozenset())


def _len(walk: Walking, _node: Any, given: Arguments) -> Value:
    first = given.at(0) or NOTHING
    walk.operator(first, "__len__")
    return Value(frozenset({"shape"}) if first.kinds & {"value", "param"} else first.kinds)


def _presence(_walk: Walking, _node: Any, given: Arguments) -> Value:
    kinds = (given.at(0) or NOTHING).kinds
    return Value(frozenset("presence" if kind in ("value", "param") else kind for kind in kinds))


def _same(walk: Walking, node: Any, given: Arguments) -> Value:
    """``iter`` and ``reversed``: they give the items of their argument."""
    first = given.at(0)
    if first is None:
        return listed(())
    walk.escapes(node, Arguments(named={name: v for name, v in given.named.items() if name == "key"}))
    if first.items is not None:
        return listed(first.items, exact=first.exact)
    return listed((item_of(walk.reader, first, None),), exact=False)


def _unordered(walk: Walking, node: Any, given: Arguments) -> Value:
    walk.asked(node, *given.values)
    found = _same(walk, node, given)
    return listed(found.items or (), exact=False)


def _zip(walk: Walking, _node: Any, given: Arguments) -> Value:
    return listed((listed([item_of(walk.reader, each, None) for each in given.values]),), exact=False)


def _enumerate(walk: Walking, _node: Any, given: Arguments) -> Value:
    return listed((listed((NOTHING, item_of(walk.reader, given.at(0) or NOTHING, None))),), exact=False)


def _map(walk: Walking, node: Any, given: Arguments) -> Value:
    items = [item_of(walk.reader, each, None) for each in given.values[1:]]
    return listed((walk.call(node, given.values[0], Arguments(tuple(items))),), exact=False)


def _filter(walk: Walking, node: Any, given: Arguments) -> Value:
    item = item_of(walk.reader, given.values[1], None)
    found = walk.call(node, given.values[0], Arguments((item,)))
    if found.kinds:
        walk.note(walk.reader.found.conditions, node, found.kinds)
    return listed((item,), exact=False)


def _reduce(walk: Walking, node: Any, given: Arguments) -> Value:
    item = item_of(walk.reader, given.values[1], None)
    start = given.at(2) or item
    return walk.call(node, given.values[0], Arguments((either((start, item)), item)))


def _next(walk: Walking, node: Any, given: Arguments) -> Value:
    first = given.at(0) or NOTHING
    if any(not each.owned for each in first.each):
        walk.note(walk.reader.found.side_effects, node)
    return either((item_of(walk.reader, first, None), *given.values[1:]))


def _partial(_: Walking, _node: Any, given: Arguments) -> Value:
    if not given.values:
        return NOTHING
    return Value(local=Partial(given.values[0], replace(given, values=given.values[1:])))


def _extreme(walk: Walking, node: Any, given: Arguments) -> Value:
    walk.asked(node, *given.values)
    kinds = kinds_of(given.all)
    if "shape" in kinds:
        for each in given.values:
            walk.sizes(each)
    elif kinds & {"value", "param"} and len(given.values) > 1:
        walk.note(walk.reader.found.clamps, node)
    return Value(kinds)


def _number(walk: Walking, node: Any, given: Arguments) -> Value:
    walk.asked(node, *given.values)
    return Value(kinds_of(given.all))


def _scripting(_walk: Walking, _node: Any, _given: Arguments) -> Value:
    return known(False)  # what is scripted is no longer Python, and is not read


def _tracing(walk: Walking, node: Any, _given: Arguments) -> Value:
    walk.note(walk.reader.found.conditions, node, {"traced"})
    return known(False)


def _environment(walk: Walking, node: Any, _given: Arguments) -> Value:
    walk.unread(node, "the environment is looked at")
    return Value(frozenset({"state"}))


_BY_FUNCTION: list[tuple[_Call, tuple[Any, ...]]] = [
    (_getattr, (getattr,)),
    (_hasattr, (hasattr,)),
    (_setattr, (setattr, delattr, object.__setattr__, object.__delattr__)),
    (_effect, (print, open, exec, eval, input, builtins.breakpoint, compile, __import__)),
    (_everything, (vars, globals, locals, dir)),
    (_type, (type,)),
    (_len, (len,)),
    (_presence, (isinstance, issubclass, callable, id, hash)),
    (_same, (iter, reversed)),
    (_unordered, (sorted,)),
    (_zip, (zip,)),
    (_enumerate, (enumerate,)),
    (_map, (map,)),
    (_filter, (filter,)),
    (_reduce, (functools.reduce,)),
    (_next, (next,)),
    (_partial, (functools.partial,)),
    (_extreme, (min, max)),
    (_number, (abs, round, sum, any, all, pow, divmod, repr, str, format, ord, chr)),
    (_environment, (os.getenv,)),
    (_scripting, (IS_SCRIPTING,)),
    (_tracing, (IS_TRACING,)),
]
BUILTINS: Mapping[int, _Call] = {id(function): handler for handler, functions in _BY_FUNCTION for function in functions}
"""By the ``id`` of the function: not everything that is called has a hash."""
