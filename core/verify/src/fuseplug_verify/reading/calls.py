"""Finds what a call runs, returns and changes."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import OPERATIONS, writes
from .arguments import Arguments
from .builtin_calls import BUILTINS, method_of_python
from .findings import MISSING
from .libraries import home, is_library, is_readable, is_wrapped
from .lookup import Memoised, in_class, is_a
from .memoised import answer_of, answered
from .objects import item_of
from .tables import CLAMPS, COPIES, CREATES, DTYPES, LIBRARIES, LOGS, NOT_COMPUTING, RANDOM, SHAPES
from .values import NEVER, NOTHING, Value, either, is_tried, known, part_of
from .walking import Walking

CONTEXTS = (torch.autocast, contextlib.nullcontext, torch.no_grad, torch.enable_grad, torch.inference_mode)
"""Contexts that the code may enter: the runs of the original enter them, too."""

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)

_Handler = Callable[[Walking, Any, Value, Arguments], Value]


def call(walk: Walking, node: Any, function: Value, arguments: Arguments) -> Value:
    """Follow a call of *function* at *node*."""
    return either(_call(walk, node, option, arguments) for option in function.each)


def _call(walk: Walking, node: Any, function: Value, arguments: Arguments) -> Value:
    thing = function.object
    if function is NEVER or thing is None:
        return NEVER
    if function.fields is not None:
        return _made(walk, node, function, arguments)
    if _logs(function, thing):
        return known(None)
    if (builtin := BUILTINS.get(id(thing))) is not None:
        return builtin(walk, node, arguments)
    if thing is MISSING or is_a(thing, Tensor):
        return _of_tensor(walk, node, function, arguments)
    handler: _Handler = next((handler for kind, handler in _BY_KIND if is_a(thing, kind)), _other)
    return handler(walk, node, function, arguments)


def _logs(function: Value, thing: Any) -> bool:
    """Whether a call only logs. Functions that log a message once are memoised."""
    plain = is_a(thing, (types.FunctionType, types.BuiltinFunctionType))
    name = function.name or (thing.__name__ if plain else "")
    logger = function.receiver is not None and is_a(function.receiver.object, logging.Logger | logging.LoggerAdapter)
    return (logger and (name in LOGS or name.endswith("_once"))) or (
        name in LOGS and home(thing) in ("warnings", "_warnings", "logging")
    )


def _partial(walk: Walking, node: Any, function: Value, arguments: Arguments) -> Value:
    partial = function.object
    first = [known(value, fresh=False) for value in partial.args]
    named = {name: known(value, fresh=False) for name, value in partial.keywords.items()}
    more = replace(arguments, named={**named, **arguments.named}).after(*first)
    return _call(walk, node, known(partial.func, fresh=False), more)


def _module(walk: Walking, node: Any, function: Value, arguments: Arguments) -> Value:
    result = walk.reader.module(walk, node, function, arguments)
    if result.items is not None or not result.fresh or is_a(function.object, nn.Identity):
        return result
    return Value(tried=True)


def _function(walk: Walking, node: Any, function: Value, arguments: Arguments) -> Value:
    thing, receiver = function.object, function.receiver
    if is_wrapped(thing):
        return walk.reader.function(thing, arguments if receiver is None else arguments.after(receiver))
    if receiver is not None and not is_a(receiver.object, types.ModuleType):
        owner, name = receiver.object, thing.__name__
        if receiver.fields is not None and thing is nn.Module.__init__:
            return known(None)
        # The ``get`` that ``Mapping`` gives a class of a model calls the class's own ``__getitem__``.
        if name == "get" and is_readable(in_class(type(owner), "__getitem__")):
            default = arguments.at(1, "default") or known(None)
            return either((item_of(walk, node, receiver, arguments.at(0) or NOTHING), default))
        if receiver.known and not is_a(owner, Tensor):
            return walk.unread(node, f"{name} of a {type(owner).__name__} is not known")
    return _computed(walk, node, function, thing, arguments)


def _instance(walk: Walking, node: Any, function: Value, arguments: Arguments) -> Value:
    """Follow a call of a class: its value is an instance."""
    cls = function.object
    if issubclass(cls, CONTEXTS):
        return Value(cls=cls)
    if home(cls).startswith("torch.distributions."):
        return Value(tried=is_tried(arguments.all), cls=cls)
    if not issubclass(cls, nn.Module):
        return _computed(walk, node, known(cls), cls, arguments)
    if is_readable(in_class(type(cls), "__call__")) or is_readable(in_class(cls, "__new__")):
        return walk.unread(node, f"how a {cls.__name__} is made cannot be read")
    value = Value(cls=cls, fields={})
    constructor = in_class(cls, "__init__")
    if is_readable(constructor):
        walk.reader.function(constructor, arguments.after(value))
    return value


def _made(walk: Walking, node: Any, function: Value, arguments: Arguments) -> Value:
    """Follow a call of a module that was made in the call."""
    forward = in_class(function.cls or object, "forward")
    if is_readable(forward) and in_class(function.cls or object, "__call__") is nn.Module.__call__:
        return walk.reader.function(forward, arguments.after(function))
    return walk.unread(node, "what is made and called cannot be read")


def _other(walk: Walking, node: Any, function: Value, arguments: Arguments) -> Value:
    """Follow a call of something that is neither a Python function nor a module nor a class."""
    thing = function.object
    method = in_class(type(thing), "__call__")
    if method is MISSING:
        return NEVER
    if not is_a(thing, types.BuiltinFunctionType) and is_readable(method):
        return walk.reader.function(method, arguments.after(function))
    receiver = function.receiver
    if receiver is not None and receiver.known and not is_a(receiver.object, (Tensor, types.ModuleType)):
        return method_of_python(walk, node, receiver, function.name, arguments)
    return _computed(walk, node, function, thing, arguments)


def _memoised(walk: Walking, node: Any, function: Value, arguments: Arguments) -> Value:
    memoised = function.object
    if not arguments.all and (answer := answered(memoised)) is not MISSING:
        space = answer_of(memoised)
        walk.reader.looked(space, space.name, answer)
        return known(answer, fresh=False)
    return _call(walk, node, replace(function, object=memoised.__wrapped__), arguments)


def _of_tensor(walk: Walking, node: Any, function: Value, arguments: Arguments) -> Value:
    """Follow a call of a method of an unknown value, which may be a tensor, or of a container made in the call."""
    receiver = function.receiver
    if receiver is None:
        what = "an argument" if function.argument else "what is not known"
        return walk.unread(node, f"{what} is called")
    if receiver.items is not None or receiver.named is not None:
        return method_of_python(walk, node, receiver, function.name, arguments)
    if not hasattr(receiver.cls or Tensor, function.name) or (receiver.cls and issubclass(receiver.cls, CONTEXTS)):
        return walk.unread(node, f"it is not known which {function.name} is called")
    return _computed(walk, node, function, MISSING, arguments)


_BY_KIND: tuple[tuple[type, _Handler], ...] = (
    (functools.partial, _partial),
    (Memoised, _memoised),
    (nn.Module, _module),
    (type, _instance),
    (types.FunctionType, _function),
)


def _computed(walk: Walking, node: Any, function: Value, thing: Any, arguments: Arguments) -> Value:
    """What a function of a library, or a method of a tensor, returns. Its code is not read."""
    receiver = function.receiver if function.receiver and not is_a(function.receiver.object, types.ModuleType) else None
    name = function.name if thing is MISSING else getattr(thing, "__name__", function.name)
    reading = walk.reader.reading
    tensors = [*filter(None, [receiver]), *arguments.all]
    if not computes(thing, name):
        return walk.unread(node, f"{home(thing)}.{name} may do more than compute")
    for value in tensors:
        _hand_over(walk, node, value)
    reading.draws |= name in RANDOM
    reading.clamps |= name in CLAMPS or (name in ("max", "min") and len(tensors) == 2 and _is_tensor(tensors[1]))
    first = tensors[0] if tensors else NOTHING
    changed = [first] if _is_in_place(thing, name, arguments) else []
    if any(value.foreign for value in (*changed, *_parts(arguments.named.get("out", NOTHING)))):
        walk.note(reading.side_effects, node)
    if name in DTYPES and (name != "type" or len(tensors) < 2):
        return NOTHING
    if name in SHAPES or (name in RANDOM and not changed):
        return Value(tried=True)
    if is_a(thing, type) or not tensors or name in CREATES | COPIES or name.startswith("new_"):
        return Value(tried=is_tried(tensors))
    return part_of(*tensors)


def computes(thing: Any, name: str) -> bool:
    """Whether *thing*, a library's function of this *name*, is known to do nothing but compute."""
    if name in NOT_COMPUTING:
        return False
    if thing is MISSING:
        return True
    if is_a(thing, OPERATIONS):
        return not writes(thing)
    where = home(thing)
    if any(where == library or where.startswith(f"{library}.") for library in LIBRARIES):
        return is_library(thing)
    if where.partition(".")[0] != "torch" or where.startswith(("torch.jit", "torch.distributed")):
        return False
    if is_a(thing, types.BuiltinFunctionType) and hasattr(torch.ops.aten, name):
        return True
    # A scan only calls the function that it is given.
    return is_a(thing, _FUNCTIONS) and name in CREATES | DTYPES | SHAPES | {"associative_scan"}


def _is_tensor(value: Value) -> bool:
    return value.tried or is_a(value.object, (Tensor, float))


def _is_in_place(thing: Any, name: str, arguments: Arguments) -> bool:
    inplace = arguments.named.get("inplace")
    if inplace is not None:
        return inplace.object is not False
    # *inplace* may be given by position, as to F.relu.
    by_position = home(thing) == "torch.nn.functional" and any(value.object is True for value in arguments.values)
    return by_position or (name.endswith("_") and not name.endswith("__"))


def _hand_over(walk: Walking, node: Any, value: Value) -> None:
    """Note the objects of a model in *value* as unread: what a library's code does with them is not known."""
    for option in _parts(value):
        walk.opaque(node, option)
        if is_a(option.object, (types.FunctionType, types.MethodType, nn.Module)):
            walk.unread(node, f"a {type(option.object).__name__} is passed to code that is not read")


def _parts(value: Value) -> Iterator[Value]:
    """Everything that *value* may be, and everything in it."""
    for option in value.each:
        yield option
        for item in option.items or ():
            yield from _parts(item)
