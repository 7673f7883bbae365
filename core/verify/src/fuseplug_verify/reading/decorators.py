"""Finds what a library's decorator does around the function that it wraps, from the contents of its closure."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import grad_mode

from ..torch_private import DYNAMO_WRAPPERS
from .libraries import home, is_library, wrapped_by
from .lookup import is_a

_GRAD = tuple(c for c in vars(grad_mode).values() if isinstance(c, type) and hasattr(c, "__exit__"))
_NOTHING = ("functools", "torch.compiler", *DYNAMO_WRAPPERS)


def context_kinds(function: types.FunctionType) -> frozenset[str]:
    """What kinds of context *function*, which wraps another, puts around it: none if it is no wrapper of a library."""
    if wrapped_by(function) is None or not is_library(function) or home(function).startswith(_NOTHING):
        return frozenset()
    if function.__qualname__ and home(function) == "torch.amp.autocast_mode":
        return frozenset({"autocast"})
    kinds = {kind for thing in _held(function) for kind in [kind_of_context(thing)] if kind != "other"}
    return frozenset(kinds or {"other"})


def kind_of_context(thing: Any) -> str:
    """What kind of context *thing*, a class or an instance, is."""
    cls = thing if is_a(thing, type) else type(thing)
    if issubclass(cls, torch.autocast):
        return "autocast"
    return "grad" if issubclass(cls, _GRAD) else "other"


def _held(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        yield held
        if is_a(held, types.MethodType):
            yield held.__self__
        elif is_a(held, types.FunctionType) and is_library(held):
            yield from _held(held)
