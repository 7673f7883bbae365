"""Finds what an attribute or an item of a value is, and notes everything that is read on the way."""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import Arguments
from .following import Following
from .found import MISSING
from .libraries import is_library, is_readable
from .lookup import answers_itself, attribute, class_with, in_class, is_a, namespace
from .tables import OF_TENSOR, SHAPE, TENSORS
from .values import NEVER, NOTHING, Value, either, known, part_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_BOUND = (types.FunctionType, staticmethod, classmethod)
_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType,
         types.ClassMethodDescriptorType, types.BuiltinFunctionType)  # fmt: skip
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodType)
_MOST = 16


_NAMES = (torch.dtype, torch.layout, torch.memory_format)


def kind_of(thing: Any, name: str = "") -> tuple[str, ...]:
    """The kinds of a condition that tests *thing*, an object that outlives the call."""
    if is_a(thing, Tensor):
        return ("param",)
    if name == "training":
        return ("training",)
    return () if is_a(thing, _CODE) else ("state",)


def attribute_of(reader: Following, value: Value, name: str, where: Any = None) -> Value:
    """What the attribute *name* of *value* is; *where* tells a person which code asks for it."""
    return either(_attribute(reader, each, name, where) for each in value.each)


def _attribute(reader: Following, v: Value, name: str, where: Any) -> Value:
    if v is NEVER:
        return NEVER
    if v.after is not None and v.receiver is not None:
        return _of_bases(reader, v.receiver, v.after, name, where)
    if v.made is not None:
        return _of_made(reader, v, v.made, name, where)
    if not v.known or is_a(v.object, Tensor):
        if name in ("_version", "_base", "grad") and v.kinds & TENSORS:
            reader.unread(v.object, f"{name} of a tensor is looked at{_at(where)}", None)
        return _unknown(v, name)
    if is_a(v.object, types.ModuleType):
        return _of_module(reader, v.object, name, where)
    return _of_object(reader, v, name, where)


def _of_made(reader: Following, v: Value, cls: type, name: str, where: Any) -> Value:
    """An attribute of an instance of *cls* that was made in the call."""
    if v.fields is not None and name in v.fields:
        return v.fields[name]
    found = in_class(cls, name)
    return _bound(reader, v, name, found, where) if is_a(found, (*_BOUND, property)) else _unknown(v, name)


def _of_object(reader: Following, v: Value, name: str, where: Any) -> Value:
    """An attribute of an object that outlives the call."""
    if name == "__dict__":
        reader.unread(v.object, f"everything that a {type(v.object).__name__} has is looked at{_at(where)}", None)
        return Value(owned=False)
    if name == "__class__":
        return known(type(v.object), owned=False)
    found = attribute(v.object, name)
    if is_a(found, (*_BOUND, property)):
        return _bound(reader, v, name, found, where)
    return _data(reader, v, name, found, where)


def _of_bases(reader: Following, receiver: Value, after: type, name: str, where: Any) -> Value:
    """What ``super()`` finds: it belongs to the base that has it, not to the receiver's own class."""
    owner = receiver.made or receiver.object
    cls = owner if is_a(owner, type) else type(owner)
    base = class_with(cls, name, after)
    found = MISSING if base is None else vars(base)[name]
    if base is not None and not receiver.owned and not is_library(base):
        reader.looked(vars(base), name, found, base)
    return _bound(reader, receiver, name, found, where, of_base=True)


def _unknown(v: Value, name: str) -> Value:
    """An attribute, or a method, of what may be a tensor."""
    kinds = v.kinds
    if is_a(v.object, Tensor):
        kinds = frozenset({"param"})
    if name in SHAPE:
        kinds = frozenset({"shape"}) if kinds & TENSORS else kinds
    elif name in OF_TENSOR:
        kinds = frozenset({OF_TENSOR[name]}) if kinds & TENSORS else kinds
    return Value(kinds, owned=v.owned, given=v.given, receiver=v, name=name)


def _of_module(reader: Following, module: types.ModuleType, name: str, where: Any) -> Value:
    found = vars(module).get(name, MISSING)
    if found is MISSING:
        found = sys.modules.get(f"{module.__name__}.{name}", MISSING)
    if is_library(module):
        if found is MISSING and type(module) is not types.ModuleType:
            reader.unread(module, f"{module.__name__}.{name} is a setting of {module.__name__}{_at(where)}", None)
        # Names for dtypes and layouts are the same for ever; other values of a library may be settings of it.
        named = found is MISSING or is_a(found, _NAMES)
        return Value(frozenset() if named else frozenset(kind_of(found)), object=found, owned=False, name=name)
    reader.looked(vars(module), name, found)
    if found is MISSING and answers_itself(module):
        reader.unread(module, f"{module.__name__}.{name} is answered by code of the module{_at(where)}", None)
    return known(found, *kind_of(found), owned=False)


def _bound(reader: Following, v: Value, name: str, found: Any, where: Any, *, of_base: bool = False) -> Value:
    """An attribute that a class defines."""
    if is_a(found, property):
        return _of_property(reader, v, name, found, where)
    function = found.__func__ if is_a(found, staticmethod | classmethod) else found
    receiver: Value | None = v
    of_class = of_base or v.made is not None or name not in namespace(v.object)
    if v.path is not None and is_a(function, types.FunctionType):
        if not of_class:
            reader.found.reads.setdefault((*v.path, name), found)
        elif not of_base:
            reader.found.methods.setdefault((v.path, name), function)
    if is_a(v.object, type):
        of_class = is_a(found, classmethod)
    elif is_a(found, classmethod):
        receiver = known(v.made or type(v.object), owned=False)
    if is_a(found, staticmethod) or not of_class:
        receiver = None
    if found is MISSING or not is_a(found, _BOUND):
        return Value(object=found, owned=False, receiver=v, name=name)
    return Value(object=function, owned=False, receiver=receiver, name=name)


def _of_property(reader: Following, v: Value, name: str, found: property, where: Any) -> Value:
    if v.path is not None and (holder := class_with(type(v.object), name)) is not None:
        reader.looked(vars(holder), name, found)
    getter: Any = found.fget
    if is_readable(getter):
        return reader.function(getter, Arguments((v,)))
    reader.unread(v.object, f"the property {name} of a {type(v.object).__name__} cannot be read{_at(where)}", None)
    return part_of(v)


def _data(reader: Following, v: Value, name: str, found: Any, where: Any) -> Value:
    """An attribute that is neither a method nor a property."""
    owner = v.object
    if found is MISSING:
        return _absent(reader, v, name, where)
    of_class = name not in namespace(owner)
    if (of_class and (is_a(found, _OF_C) or _is_cached(found))) or is_a(owner, logging.Logger):
        return Value(v.kinds, object=found, owned=v.owned, given=v.given, receiver=v, name=name)
    if of_class and in_class(type(found), "__get__") is not MISSING and not is_a(found, type):
        if not is_a(found, types.MemberDescriptorType):
            reader.unread(
                owner, f"{name} of a {type(owner).__name__} is a descriptor, which is not read{_at(where)}", None
            )
        return part_of(v)
    kinds = frozenset(kind_of(found, name))
    if v.path is not None:
        path = (*v.path, name)
        reader.found.reads.setdefault(path, found)
        return Value(kinds, path, found, owned=False, name=name)
    if not v.owned:
        if name in (own := namespace(owner)):
            reader.looked(own, name, found)
        elif not is_library(owner):
            reader.looked(vars(owner if is_a(owner, type) else type(owner)), name, found, owner)
    return Value(kinds, object=found, owned=v.owned, given=v.given, name=name)


def _is_cached(thing: Any) -> bool:
    """Whether ``functools`` caches what *thing* returns."""
    return is_a(thing, functools._lru_cache_wrapper)


def _absent(reader: Following, v: Value, name: str, where: Any) -> Value:
    """An attribute that is not there now: below the module it may appear later."""
    owner, path = v.object, None if v.path is None else (*v.path, name)
    if path is not None:
        reader.found.reads.setdefault(path, MISSING)
    if answers_itself(owner):
        reader.unread(owner, f"{name} of a {type(owner).__name__} is answered by code of its own{_at(where)}", None)
    if path is None:
        return replace(NEVER, kinds=frozenset({"presence"}), name="never", _key=[])
    return Value(frozenset({"state"}), path, MISSING, owned=False, name="never")


def item_of(reader: Following, value: Value, index: Value | None) -> Value:
    """What is in *value*: at *index*, or anywhere."""
    indices = (None,) if index is None else index.each
    return either(_item(reader, each, at) for each in value.each for at in indices)


def _item(reader: Following, v: Value, index: Value | None) -> Value:
    at: Any = index.object if index is not None else MISSING
    if v is NEVER:
        return NEVER
    if v.named is not None and is_a(at, str):
        return v.named.get(at, v.others or NEVER)
    if v.items is not None:
        return _of_items(v, v.items, at)
    return _of_held(reader, v, index, at)


def _of_items(v: Value, items: tuple[Value, ...], at: Any) -> Value:
    """What is at *at* in a container that was made in the call."""
    if v.exact and type(at) is int and -len(items) <= at < len(items):
        return items[at]
    return either(items) if items else NOTHING


def _of_held(reader: Following, v: Value, index: Value | None, at: Any) -> Value:
    """What is in an object: modules and Python's own containers are looked into, methods of models are read."""
    held, method = v.object, "__getitem__" if index is not None else "__iter__"
    if is_a(held, _CONTAINERS) and not _is_own(held, method):
        if index is None and is_a(held, nn.ModuleDict):
            return NOTHING
        return _any_module(v, held._modules, at)
    if is_a(held, dict | list | tuple | types.MappingProxyType) and not is_readable(in_class(type(held), method)):
        return item_in(reader, v, index)
    if is_a(held, type | types.FunctionType) and in_class(type(held), method) is MISSING:
        return NEVER
    if v.known and not is_library(held) and is_readable(function := in_class(type(held), method)):
        if not v.owned and (base := class_with(type(held), method)) is not None:
            reader.looked(vars(base), method, function, base)
        found = reader.function(function, Arguments((v,) if index is None else (v, index)))
        return found if index is not None else item_of(reader, found, None)
    if _is_hidden(v):
        reader.unread(held, f"what is in a {type(held).__name__} is looked at", None)
    kinds = v.kinds | ((index.kinds - {"shape"}) if index is not None else frozenset())
    return Value(kinds, owned=v.owned, given=v.given)


def _is_hidden(v: Value) -> bool:
    """Whether it is an object of a library whose items may change between calls, and cannot be looked into."""
    lasting = v.known and not v.owned and is_library(v.object)
    return lasting and not is_a(v.object, Tensor | str | bytes | range | types.ModuleType)


def _is_own(container: nn.Module, method: str) -> bool:
    """Whether a class of a model overrides how *container* gives its items."""
    function = in_class(type(container), method)
    return is_readable(function) and not is_library(function)


def item_in(reader: Following, v: Value, index: Value | None) -> Value:
    """What is in a dict, list or tuple, past what a subclass says."""
    held: Any = v.object
    mapping = is_a(held, dict | types.MappingProxyType)
    if mapping and index is None:
        return NOTHING
    if index is not None and index.known and is_a(index.object, int | str | type(None) | bool):
        found = _at_index(held, index.object)
        if mapping and v.path is None and is_a(index.object, str | type(None)):
            reader.looked(held, index.object, found)
        return NEVER if found is MISSING else _held(v, found)
    if mapping:
        if v.path is None and not v.owned and not v.given:
            _look_at_all(reader, held)
        return _any_of(v, dict.values(held) if is_a(held, dict) else held.values())
    return _any_of(v, (list if is_a(held, list) else tuple).__iter__(held))


def _look_at_all(reader: Following, held: Mapping[Any, Any]) -> None:
    """Keep every entry of *held*: which of them is meant is not known."""
    entries = list(dict.items(held) if isinstance(held, dict) else held.items())
    if len(entries) > _MOST:
        reader.unread(held, f"a {type(held).__name__} is looked into by a key that is not known", None)
    elif all(is_a(key, str) for key, _ in entries):
        for key, value in entries:
            reader.looked(held, key, value)


def _at_index(held: Any, index: Any) -> Any:
    if is_a(held, dict | types.MappingProxyType):
        return dict.get(held, index, MISSING) if is_a(held, dict) else held.get(index, MISSING)
    try:
        return (list if is_a(held, list) else tuple).__getitem__(held, index)
    except (IndexError, TypeError):
        return MISSING


def _any_module(v: Value, modules: Mapping[str, Any], at: Any) -> Value:
    """The module at *at*, or any of *modules*: one stands for all if they are of one class."""
    there = {name: module for name, module in modules.items() if module is not None}
    if len({type(module) for module in there.values()}) < 2 or len(there) > _MOST:
        return _any_of(v, there.values())
    if isinstance(at, int | str) and not isinstance(at, bool):
        name = str(at) if not isinstance(at, int) or at >= 0 else str(len(modules) + at)
        there = {name: there[name]} if name in there else {}
    return either(_held(v, module, name) for name, module in there.items())


def _any_of(v: Value, things: Iterable[Any]) -> Value:
    """Any of *things*; one module of each class stands for all of that class."""
    found: dict[Any, Any] = {}
    for thing in things:
        plain = is_a(thing, nn.Module) and not {"forward", "_forward_hooks"} & _own(thing)
        found.setdefault(type(thing) if plain else id(thing), thing)
        if len(found) > _MOST:
            return Value(v.kinds, owned=v.owned, given=v.given)
    return (
        either(_held(v, thing) for thing in found.values()) if found else Value(v.kinds, owned=v.owned, given=v.given)
    )


def _own(module: nn.Module) -> set[str]:
    return {"forward"} & namespace(module).keys()


def _held(v: Value, thing: Any, name: str = "*") -> Value:
    # Only modules have paths: what a plain list or dict holds is not registered anywhere.
    inside = v.path is not None and is_a(thing, nn.Module) and is_a(v.object, _CONTAINERS)
    path = (*(v.path or ()), name) if inside else None
    return Value(frozenset(kind_of(thing)), path, thing, owned=v.owned, given=v.given)


def _at(where: Any) -> str:
    return f" ({where})" if where else ""
