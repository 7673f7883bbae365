"""Finds what an attribute or an item of a value is, and notes everything that is read on the way."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import Arguments
from .findings import MISSING
from .libraries import is_library, is_readable
from .lookup import Memoised, answers_itself, attribute, class_with, in_class, is_a, namespace
from .tables import DTYPES, SHAPES
from .values import NEVER, NOTHING, Value, either, is_tried, known, part_of
from .walking import Walking

MAPPINGS = (dict, types.MappingProxyType)
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OF_CLASS = (types.FunctionType, staticmethod, classmethod, property)
_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
         types.BuiltinFunctionType, Memoised)  # fmt: skip
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodType)
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, float)


def attribute_of(walk: Walking, node: Any, value: Value, name: str) -> Value:
    """The attribute *name* of *value*; *node* is the code that reads it."""
    return either(_attribute(walk, node, option, name) for option in value.each)


def _attribute(walk: Walking, node: Any, value: Value, name: str) -> Value:
    if value is NEVER:
        return NEVER
    if value.fields is not None:
        return _of_made(walk, node, value, name)
    if value.cls is not None and value.receiver is not None:
        return _of_bases(walk, node, value.receiver, value.cls, name)
    if not value.known or is_a(value.object, Tensor):
        if name in ("_version", "_base", "grad", "__dict__") and (value.tried or value.foreign):
            walk.unread(node, f"{name} is looked at")
        tried = (value.tried or name in SHAPES) and name not in DTYPES
        return Value(tried=tried, fresh=value.fresh, argument=value.argument, receiver=value, name=name)
    if is_a(value.object, types.ModuleType):
        return _of_python_module(walk, node, value.object, name)
    return _of_object(walk, node, value, name)


def _of_made(walk: Walking, node: Any, value: Value, name: str) -> Value:
    """An attribute of a module that was made in the call."""
    if value.fields is not None and name in value.fields:
        return value.fields[name]
    member = in_class(value.cls or object, name)
    if is_a(member, _OF_CLASS):
        return _member(walk, node, value, name, member)
    return NOTHING if member is MISSING else known(member, fresh=False)


def _of_bases(walk: Walking, node: Any, receiver: Value, cls: type, name: str) -> Value:
    """An attribute that ``super()`` finds. It belongs to the base that has it, not to the receiver's own class."""
    owner = receiver.cls or receiver.object
    base = class_with(owner if is_a(owner, type) else type(owner), name, cls)
    member = MISSING if base is None else vars(base)[name]
    if base is not None and not receiver.fresh and not is_library(base):
        walk.reader.looked(vars(base), name, member, base)
    return _member(walk, node, receiver, name, member, of_base=True)


def _of_python_module(walk: Walking, node: Any, module: types.ModuleType, name: str) -> Value:
    value = vars(module).get(name, MISSING)
    if value is MISSING:
        value = sys.modules.get(f"{module.__name__}.{name}", MISSING)
    if is_library(module):
        absent = value is MISSING and type(module) is types.ModuleType
        if not absent and not is_a(value, _CODE + _CONSTANTS) and not callable(value):
            walk.unread(node, f"{module.__name__}.{name} is a setting of {module.__name__}")
    else:
        walk.reader.looked(vars(module), name, value)
        if value is MISSING and answers_itself(module):
            walk.unread(node, f"{module.__name__}.{name} is answered by code of the module")
    return NEVER if value is MISSING else known(value, fresh=False)


def _of_object(walk: Walking, node: Any, value: Value, name: str) -> Value:
    """An attribute of an object that outlives the call."""
    owner = value.object
    if name in ("__dict__", "__class__"):
        return walk.unread(node, f"everything that a {type(owner).__name__} has is looked at")
    member = attribute(owner, name)
    if is_a(member, _OF_CLASS):
        return _member(walk, node, value, name, member)
    if member is MISSING:
        return _absent(walk, node, value, name)
    of_class = name not in namespace(owner)
    if (of_class and is_a(member, _OF_C)) or is_a(owner, logging.Logger):
        return Value(object=member, fresh=value.fresh, argument=value.argument, receiver=value, name=name)
    if of_class and in_class(type(member), "__get__") is not MISSING and not is_a(member, type):
        return walk.unread(node, f"{name} of a {type(owner).__name__} is a descriptor, which is not read")
    tried = is_a(member, Tensor)
    if value.path is not None:
        path = (*value.path, name)
        walk.reader.reading.reads.setdefault(path, member)
        return Value(object=member, path=path, tried=tried, fresh=False, name=name)
    if not value.fresh:
        if not of_class:
            walk.reader.looked(namespace(owner), name, member)
        elif not is_library(owner):
            walk.reader.looked(vars(owner if is_a(owner, type) else type(owner)), name, member, owner)
    return Value(object=member, tried=tried, fresh=value.fresh, argument=value.argument, name=name)


def _member(walk: Walking, node: Any, value: Value, name: str, member: Any, *, of_base: bool = False) -> Value:
    """An attribute that a class defines."""
    if is_a(member, property):
        return _of_property(walk, node, value, name, member)
    if not is_a(member, _OF_CLASS):
        return Value(object=member, fresh=False, receiver=value, name=name)
    function = member if is_a(member, types.FunctionType) else member.__func__
    of_class = of_base or value.fields is not None or name not in namespace(value.object)
    if value.path is not None and is_a(function, types.FunctionType):
        if not of_class:
            walk.reader.reading.reads.setdefault((*value.path, name), member)
        elif not of_base:
            walk.reader.reading.methods.setdefault((value.path, name), function)
    receiver: Value | None = value
    if is_a(member, classmethod) and not is_a(value.object, type):
        receiver = known(value.cls or type(value.object), fresh=False)
    elif is_a(member, staticmethod) or not of_class or (is_a(value.object, type) and not is_a(member, classmethod)):
        receiver = None
    return Value(object=function, fresh=False, receiver=receiver, name=name)


def _of_property(walk: Walking, node: Any, value: Value, name: str, member: property) -> Value:
    if value.path is not None and (holder := class_with(type(value.object), name)) is not None:
        walk.reader.looked(vars(holder), name, member, holder)
    getter: Any = member.fget
    if is_readable(getter):
        return walk.reader.function(getter, Arguments((value,)))
    return walk.unread(node, f"the property {name} cannot be read")


def _absent(walk: Walking, node: Any, value: Value, name: str) -> Value:
    """An attribute that is not there now. Below the module, it may appear later."""
    if answers_itself(value.object):
        walk.unread(node, f"{name} of a {type(value.object).__name__} is answered by code of its own")
    if value.path is None:
        return NEVER
    walk.reader.reading.reads.setdefault((*value.path, name), MISSING)
    return NEVER


def item_of(walk: Walking, node: Any, value: Value, index: Value | None) -> Value:
    """The item of *value* at *index*, or any item if *index* is ``None``."""
    indices = (None,) if index is None else index.each
    result = either(_item(walk, node, option, at) for option in value.each for at in indices)
    if index is None or not index.tried or result is NEVER:
        return result
    return either(replace(option, tried=True) for option in result.each)


def _item(walk: Walking, node: Any, value: Value, index: Value | None) -> Value:
    at: Any = MISSING if index is None else index.object
    if value is NEVER:
        return NEVER
    if value.named is not None:
        others = value.named.get(None, NEVER)
        return value.named.get(at, others) if is_a(at, str) else either(value.named.values())
    if value.items is not None:
        if value.items.exact and type(at) is int and -len(value.items) <= at < len(value.items):
            return value.items[at]
        return either(value.items) if value.items else NOTHING
    if value.known and not is_a(value.object, Tensor):
        return _item_of_object(walk, node, value, index)
    return Value(tried=is_tried((value, index or value)), fresh=value.fresh, argument=value.argument)


def _item_of_object(walk: Walking, node: Any, value: Value, index: Value | None) -> Value:
    """An item of an object. Modules and Python's own containers are looked into, and methods of models are read."""
    holder, method = value.object, "__iter__" if index is None else "__getitem__"
    function = in_class(type(holder), method)
    if is_readable(function) and not is_library(function):
        base = class_with(type(holder), method)
        walk.reader.looked(vars(base), method, function, base)
        result = walk.reader.function(function, Arguments((value, *filter(None, [index]))))
        return result if index is not None else item_of(walk, node, result, None)
    if is_a(holder, LISTS) and not (index is None and is_a(holder, nn.ModuleDict)):
        return _module_in(walk, node, value, holder._modules.values())
    if is_a(holder, (list, tuple, *MAPPINGS)):
        return item_in(walk, node, value, index)
    if holder is None or (is_a(holder, (type, types.FunctionType)) and function is MISSING):
        return NEVER
    if is_a(holder, (str, bytes, range)):
        return part_of(value)
    return walk.unread(node, f"what is in a {type(holder).__name__} is looked at")


def item_in(walk: Walking, node: Any, value: Value, index: Value | None) -> Value:
    """The item of a dict, list or tuple, bypassing the methods of a subclass."""
    holder: Any = value.object
    if index is None or not index.known or not is_a(index.object, (int, str, type(None))):
        return walk.unread(node, f"what is taken from a {type(holder).__name__} is not known")
    member = _at(holder, index.object)
    if is_a(holder, MAPPINGS) and value.path is None and not value.fresh:
        walk.reader.looked(holder, index.object, member)
    return NEVER if member is MISSING else _held(value, member)


def _at(holder: Any, index: Any) -> Any:
    if is_a(holder, MAPPINGS):
        return dict.get(holder, index, MISSING) if is_a(holder, dict) else holder.get(index, MISSING)
    try:
        return (list if is_a(holder, list) else tuple).__getitem__(holder, index)
    except (IndexError, TypeError):
        return MISSING


def _module_in(walk: Walking, node: Any, value: Value, modules: Iterable[Any]) -> Value:
    """Any of *modules*. The first stands for all, if they are of one class."""
    present = [module for module in modules if module is not None]
    if len({type(module) for module in present}) > 1 or any("forward" in namespace(module) for module in present):
        walk.unread(node, f"the modules of a {type(value.object).__name__} differ")
    return _held(value, present[0], "*") if present else part_of(value)


def _held(value: Value, thing: Any, name: str = "") -> Value:
    # Only modules have paths: the contents of a plain list or dict are not registered anywhere.
    path = (*value.path, name) if value.path is not None and name else None
    return Value(object=thing, path=path, tried=is_a(thing, Tensor), fresh=value.fresh, argument=value.argument)
