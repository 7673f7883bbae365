"""Decides whose code is read: the code of models. Functions of torch and Python are known by their names."""

from __future__ import annotations

import sys
import types
from typing import Any

from ..torch_private import DYNAMO_WRAPPERS
from .lookup import is_a

_LIBRARIES = frozenset({"torch", "torch_npu", "numpy", "einops", "triton", "typing_extensions", "packaging"})
_TRANSPARENT = ("functools", "torch.compiler", *DYNAMO_WRAPPERS)
"""The Python modules that define wrappers which only call what they wrap."""


def home(thing: Any) -> str:
    """The name of the Python module that defines *thing*, a function, a class or an object.

    For a function, its globals decide, because torch's decorators copy ``__module__`` from what they decorate.
    """
    if is_a(thing, types.FunctionType):
        return str(thing.__globals__.get("__name__", ""))
    if is_a(thing, types.BuiltinFunctionType):
        bound = thing.__self__
        return str(thing.__module__ or (bound.__name__ if is_a(bound, types.ModuleType) else home(type(bound))))
    if is_a(thing, types.MethodDescriptorType | types.WrapperDescriptorType | types.ClassMethodDescriptorType):
        return home(thing.__objclass__)
    if is_a(thing, types.ModuleType):
        return str(thing.__name__)
    return str(type.__dict__["__module__"].__get__(thing if is_a(thing, type) else type(thing)))


def is_library(thing: Any) -> bool:
    """Whether *thing* belongs to torch, Python itself, or another library that only computes."""
    top = home(thing).partition(".")[0]
    return top in _LIBRARIES or (top in sys.stdlib_module_names and top != "__main__")


def is_readable(function: Any) -> bool:
    """Whether *function* is Python code of a model or of `torch.nn.modules`."""
    if not is_a(function, types.FunctionType):
        return False
    name = home(function)
    return not is_library(function) or (name.startswith("torch.nn.modules.") and name != "torch.nn.modules.module")


def layers(function: Any) -> list[types.FunctionType]:
    """*function* and what its decorators wrap, according to ``functools.wraps``; empty if it is not a function."""
    layers: list[types.FunctionType] = []
    while is_a(function, types.FunctionType) and function not in layers:
        layers.append(function)
        function = function.__dict__.get("__wrapped__")
    return layers


def unwrapped(function: types.FunctionType) -> types.FunctionType:
    """*function*; or what it wraps, if it is a library's wrapper that only calls what it wraps."""
    every = layers(function)
    outer = (layer for layer in every if is_readable(layer) or not home(layer).startswith(_TRANSPARENT))
    return next(outer, every[-1])


def is_wrapped(function: Any) -> bool:
    """Whether *function*, or what its decorators wrap, is code to be read."""
    return any(map(is_readable, layers(function)))
