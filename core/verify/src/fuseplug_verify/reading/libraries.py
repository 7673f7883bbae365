"""Decides whose code is read: that of models. Functions of torch and Python are known by their names."""

from __future__ import annotations

import sys
import types
from typing import Any

from ..torch_private import DYNAMO_WRAPPERS
from .findings import MISSING
from .lookup import is_a

_OTHERS = frozenset({"typing_extensions", "packaging"})
_COMPUTING = frozenset({"torch", "torch_npu", "numpy", "einops", "triton"})
_TRANSPARENT = ("functools", "torch.compiler", *DYNAMO_WRAPPERS)
"""Where wrappers are written that compute what they wrap, and do nothing else."""


def home(thing: Any) -> str:
    """The name of the Python module that *thing*, a function, a class or an object, is written in.

    Of a function its globals decide, because torch's decorators copy ``__module__`` from what they decorate.
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
    cls = thing if is_a(thing, type) else type(thing)
    return str(type.__dict__["__module__"].__get__(cls))


def is_library(thing: Any) -> bool:
    """Say whether *thing* belongs to torch, Python itself, or another library that only computes."""
    top = home(thing).partition(".")[0]
    return top in _COMPUTING or (top in sys.stdlib_module_names and top != "__main__") or top in _OTHERS


def is_readable(function: Any) -> bool:
    """Say whether *function* is Python code of a model or of `torch.nn.modules`."""
    if not is_a(function, types.FunctionType):
        return False
    name = home(function)
    return not is_library(function) or (name.startswith("torch.nn.modules.") and name != "torch.nn.modules.module")


def wrapped_by(function: types.FunctionType) -> types.FunctionType | None:
    """The function that *function* says it wraps, as ``functools.wraps`` does; ``None`` if it says nothing."""
    found = function.__dict__.get("__wrapped__", MISSING)
    return found if is_a(found, types.FunctionType) else None


def unwrapped(function: types.FunctionType) -> types.FunctionType:
    """*function*, or what it wraps if it is a wrapper of a library that only calls that."""
    while not is_readable(function) and home(function).startswith(_TRANSPARENT):
        if (inner := wrapped_by(function)) is None:
            break
        function = inner
    return function


def is_wrapped(function: Any) -> bool:
    """Say whether *function*, or what its decorators wrap, is code to be read."""
    while is_a(function, types.FunctionType):
        if is_readable(function):
            return True
        function = wrapped_by(function)
    return False
