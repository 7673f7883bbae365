"""Tells by its name what a call of torch or Python does: their code is not read."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..torch_private import OpOverload, OpOverloadPacket, schemas_of
from .arguments import Arguments
from .attributes import item_in, item_of
from .following import Walking
from .found import MISSING
from .libraries import home, is_library, only_computes
from .lookup import is_a
from .tables import (
    CLAMPS,
    COMPARES,
    LOGS,
    MODULE_CHANGES,
    MUTATES,
    OF_MEMORY,
    OF_MODULE,
    OF_TENSOR,
    RANDOM,
    READS,
    SETTINGS,
    SHAPE,
    STATE,
    TENSORS,
    VIEWS,
)
from .values import NEVER, NOTHING, Value, either, kinds_of, known, listed, part_of

_OPERATIONS = OpOverload | OpOverloadPacket
_PYTHON = (dict, list, set, tuple, str, int, float, bytes)
_SETTERS = (
    "set_",
    "use_",
    "manual_seed",
    "seed",
    "_set_",
    "enable_",
    "disable_",
    "clear_",
    "increment_",
    "reset_",
    "empty_cache",
)
_SLICES = frozenset({"__getitem__", "get"})
_CONTEXTS = {"set_grad_enabled": "grad", "_set_grad_enabled": "grad", "set_autocast_enabled": "autocast",
             "set_autocast_dtype": "autocast", "_C._set_grad_enabled": "grad"}  # fmt: skip


def call_library(walk: Walking, node: Any, f: Value, thing: Any, given: Arguments) -> Value:
    """What a call returns if its code is not read: a library's, or a method of which only the name is known."""
    name = _name(f, thing)
    receiver = f.receiver
    if is_log(receiver, thing, name):
        return known(None)
    if not _is_known(walk, node, f, thing, name):
        walk.escapes(node, given)
        return Value(kinds_of([*given.all, *([receiver] if receiver else [])]) or frozenset({"value"}))
    if receiver is not None and receiver.items is not None and not receiver.known:
        return _of_local(walk, node, receiver, name, given)
    if why := _beyond(receiver, thing, name):
        walk.unread(node, why)
    _note(walk, node, f, thing, name, given)
    if not (is_a(thing, type) and name in ("partial",)):
        walk.escapes(node, given)
    return _result(walk, f, thing, name, given)


def _name(f: Value, thing: Any) -> str:
    own = getattr(thing, "__name__", "") if is_a(thing, type | types.FunctionType | types.BuiltinFunctionType) else ""
    return own or f.name or ""


def is_log(receiver: Value | None, thing: Any, name: str) -> bool:
    """Say whether a call only logs."""
    logger = receiver is not None and is_a(receiver.object, logging.Logger | logging.LoggerAdapter)
    return (logger and (name in LOGS or name.endswith("_once"))) or (
        home(thing) in ("warnings", "_warnings", "logging") and name in LOGS
    )


def _beyond(receiver: Value | None, thing: Any, name: str) -> str:
    """Why a call looks at more than its arguments and the module's attributes; ``""`` if it does not."""
    if receiver is None or is_a(receiver.object, types.ModuleType):
        return f"{name} asks for a setting" if name in SETTINGS and home(thing).startswith("torch") else ""
    if name in OF_MEMORY and (is_a(receiver.object, Tensor) or (not receiver.known and receiver.kinds & TENSORS)):
        return "where a tensor lies is looked at"
    if is_a(receiver.object, nn.Module) and name in OF_MODULE:
        return "everything below a module is looked at"
    return ""


def _is_known(walk: Walking, node: Any, f: Value, thing: Any, name: str) -> bool:
    """Whether it is known what is called; if not, it is noted as unread."""
    receiver = f.receiver
    if thing is MISSING:
        tensor = hasattr(Tensor, name)
        python = any(hasattr(each, name) for each in _PYTHON) or name in READS
        if receiver is None or tensor or (python and not (receiver.given and name in MUTATES)) or name in OF_TENSOR:
            return True
        if not receiver.given and not receiver.foreign:
            return receiver.made is None or is_library(receiver.made) or _is_unread(walk, node, name)
        if receiver.given and name in MUTATES:
            walk.note(walk.reader.found.side_effects, node)
        walk.unread(node, f"what is called {name} is not known")
        return False
    if is_a(thing, _OPERATIONS):
        return True
    owner = receiver.object if receiver is not None and receiver.known else thing
    if is_a(thing, types.FunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
        owner = thing
    if not is_library(owner):
        walk.unread(node, f"{home(thing) or type(thing).__name__}.{name} cannot be read")
        return False
    if not only_computes(thing if receiver is None else owner):
        walk.unread(node, f"{home(thing)}.{name} does more than compute")
        return False
    return True


def _is_unread(walk: Walking, node: Any, name: str) -> bool:
    walk.unread(node, f"what is called {name} is not known")
    return False


def _writes(thing: Any, given: Arguments) -> Iterator[Value]:
    """What an operation of torch writes into, by its schema."""
    for schema in schemas_of(thing) if is_a(thing, _OPERATIONS) else ():
        for place, each in enumerate(schema.arguments):
            found = given.at(place, each.name)
            if each.alias_info is not None and each.alias_info.is_write and found is not None:
                yield found


def _note(walk: Walking, node: Any, f: Value, thing: Any, name: str, given: Arguments) -> None:
    """Keep what the call does besides computing, and what its computation is sensitive to."""
    found, receiver = walk.reader.found, f.receiver
    subject = receiver if receiver is not None and not is_a(receiver.object, types.ModuleType) else given.at(0)
    tensors = home(thing).partition(".")[0] in ("torch", "torch_npu", "numpy") if thing is not MISSING else True
    tensors = tensors or (receiver is not None and is_a(receiver.object, Tensor))
    if (tensors and name in RANDOM) or _draws(thing, name):
        walk.note(found.random, node)
    arguments = len(given.values) + (receiver is not None) + len(given.named)
    if tensors and _clamps(name, given, arguments):
        walk.note(found.clamps, node)
    if name in _CONTEXTS and tensors:
        walk.note(found.contexts, node, {_CONTEXTS[name]})
    elif receiver is None and tensors and name.startswith(_SETTERS) and not is_a(thing, type):
        walk.note(found.side_effects, node)
    written = any(each.foreign for each in _writes(thing, given))
    if written or _changes(name, subject, receiver, given, tensors):
        walk.note(found.side_effects, node)


def _draws(thing: Any, name: str) -> bool:
    """Whether *thing* draws random numbers."""
    if thing is MISSING:
        return False
    bound = getattr(thing, "__self__", None) if not is_a(thing, type) else None
    where = home(thing) if bound is None or is_a(bound, type | types.ModuleType) else home(type(bound))
    top = where.partition(".")[0]
    if where.startswith(("torch.random", "numpy.random")) or top in ("random", "_random", "secrets"):
        return True
    return top == "torch" and name in RANDOM


def _clamps(name: str, given: Arguments, arguments: int) -> bool:
    """Whether a function of this name treats some magnitudes otherwise, counting a method's owner as an argument."""
    if name in ("max", "min"):
        last = given.values[-1] if given.values else NOTHING
        return (
            arguments == 2
            and bool(given.values)
            and type(last.object) is not int
            and bool(last.kinds & {"value", "param", "state"})
        )
    if name in COMPARES:
        final = given.values[-1] if given.values else None
        return not (final is not None and type(final.object) in (int, float) and final.object == 0)
    return name in CLAMPS and not (name == "where" and arguments == 1)


def _changes(name: str, subject: Value | None, receiver: Value | None, given: Arguments, tensors: bool) -> bool:
    """Whether something changes that was not made in the call."""
    out = given.named.get("out")
    if out is not None and (out.foreign or any(each.foreign for each in out.items or ())):
        return True
    if subject is None:
        return False
    if tensors and subject.foreign and (_is_in_place(name) or _asks_in_place(given)):
        return True
    return receiver is not None and any(_changes_its_owner(name, each) for each in receiver.each if not each.owned)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _asks_in_place(given: Arguments) -> bool:
    inplace = given.named.get("inplace")
    return inplace is not None and inplace.object is not False


def _changes_its_owner(name: str, owner: Value) -> bool:
    """Whether a method called *name* changes the object that it is a method of."""
    if is_a(owner.object, nn.Module):
        return name in MODULE_CHANGES or "register" in name or name == "apply"
    if name not in MUTATES or is_a(owner.object, Tensor | types.ModuleType | str | tuple | type):
        return False
    return owner.known or not hasattr(Tensor, name)


def _of_local(walk: Walking, node: Any, receiver: Value, name: str, given: Arguments) -> Value:
    """A method of a container that was made in the call."""
    target = getattr(getattr(node, "func", None), "value", None)
    added = given.at(0) or NOTHING
    if name in ("append", "add", "appendleft", "insert"):
        walk.grown(target, receiver, given.values[-1] if given.values else added)
    elif name in ("extend", "update"):
        for each in [item_of(walk.reader, v, NOTHING) for v in given.values] + list(given.named.values()):
            walk.grown(target, receiver, each)
    elif name in ("get", "pop", "setdefault", "popleft", "popitem"):
        taken = _taken(walk, receiver, name, given)
        if name != "get" and receiver.others is not None:
            walk.grown(target, receiver, given.at(1) or NOTHING)
        return taken
    elif name == "items":
        return listed((listed((NOTHING, item_of(walk.reader, receiver, NOTHING))),), exact=False)
    elif name == "values":
        return listed((item_of(walk.reader, receiver, NOTHING),), exact=False)
    elif name == "keys":
        return listed((NOTHING,), exact=False)
    elif name == "copy":
        return receiver
    return Value(receiver.kinds | kinds_of(given.all))


def _taken(walk: Walking, receiver: Value, name: str, given: Arguments) -> Value:
    """An item that a method takes out of a container that was made in the call, or its default."""
    index, default = given.at(0) or NOTHING, given.at(1, "default")
    found = item_of(walk.reader, receiver, index if is_a(index.object, str | int) else None)
    if found is NEVER:
        return default or known(None)
    if (
        receiver.named is not None
        and is_a(index.object, str)
        and (index.object in receiver.named or not receiver.others)
    ):
        return found
    if default is None and name == "get":
        default = known(None)
    return either([found, *([default] if default is not None else [])])


def _result(walk: Walking, f: Value, thing: Any, name: str, given: Arguments) -> Value:
    receiver = f.receiver
    everything = [*given.all, *([receiver] if receiver is not None else [])]
    kinds = kinds_of(everything)
    if _draws(thing, name) and not kinds:
        return Value(frozenset({"random"}))
    if name in STATE and (receiver is None or receiver.known or name == "is_inference"):
        return Value(frozenset({STATE[name]}))
    if is_a(thing, type):
        return Value(_data(kinds), made=thing)
    if receiver is not None and receiver.known and not is_a(receiver.object, Tensor | types.ModuleType):
        return _of_object(walk, receiver, name, given, kinds)
    if name in SHAPE:
        return Value(frozenset({"shape"}) if kinds else kinds)
    if name in OF_TENSOR and (name != "type" or not given.values):
        return Value(frozenset({OF_TENSOR[name]}))
    first = receiver if receiver is not None else given.at(0) or given.named.get("input")
    if first is not None and (name in VIEWS or _is_in_place(name)):
        if first.items is not None:
            return listed(first.items, exact=False)
        return part_of(Value(_data(kinds), owned=first.owned, given=first.given))
    return Value(_data(kinds))


def _data(kinds: frozenset[str]) -> frozenset[str]:
    """*kinds* of a computed result: one that depends on values is not also noted for shapes and dtypes."""
    return kinds & {"value", "param"} if kinds & {"value", "param"} else kinds


def _of_object(walk: Walking, receiver: Value, name: str, given: Arguments, kinds: frozenset[str]) -> Value:
    """A method of an object of Python's own."""
    thing = receiver.object
    if is_a(thing, nn.ModuleList | nn.ModuleDict | nn.Sequential | Mapping | list | tuple):
        if name in ("values", "children", "modules"):
            return listed((item_of(walk.reader, receiver, Value()),), exact=False)
        if name in ("items", "named_children"):
            return listed((listed((NOTHING, item_of(walk.reader, receiver, Value()))),), exact=False)
        if name in _SLICES:
            plain = is_a(thing, dict | list | tuple | types.MappingProxyType)
            look = item_in if plain else item_of
            found = either(look(walk.reader, receiver, at) for at in (given.at(0) or NOTHING).each)
            default = given.at(1) or known(None)
            return found if name != "get" else default if found is NEVER else either((found, default))
    return Value(kinds)
