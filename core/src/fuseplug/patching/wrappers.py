"""Finds what a wrapper holds: the callables that it may call, and how to replace them.

Parallelism, mixed precision and hooks replace a method by a function that closes over the previous method. Every layer
that transformers' tensor parallelism shards has a wrapper of this kind. Wrappers hold callables in closure cells,
partials, bound methods and attributes of objects. The defaults of a function are not searched.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

_DEEPEST = 8
_OPAQUE = (type, nn.Module, torch.Tensor, types.ModuleType)

Put = Callable[[Any], None]


class Held(NamedTuple):
    """Something that a wrapper holds.

    Attributes:
        value: What the wrapper holds.
        put: Puts another value in its place; ``None`` if that is impossible.
        called: Whether the wrapper may call the value. ``__wrapped__`` only says what a wrapper was made from.
    """

    value: Any
    put: Put | None
    called: bool = True


def reached(top: Held, module: nn.Module, is_end: Callable[[Any], bool]) -> Iterator[Held]:
    """Yield *top* and everything that *top* holds, directly or indirectly, if *is_end* is true of its value.

    Args:
        top: Where to begin.
        module: The module whose method is wrapped. A function that names one of the module's attributes, as
            accelerate's hooks name ``_old_forward``, may call that attribute.
        is_end: Tells which values to yield. A value that is yielded is not searched.
    """
    seen: set[tuple[int, bool]] = set()
    level = [top]
    for _ in range(_DEEPEST):
        following: list[Held] = []
        for place in level:
            if is_end(place.value):
                yield place
            elif callable(place.value) and (id(place.value), place.called) not in seen:
                seen.add((id(place.value), place.called))
                following += [
                    inner._replace(called=inner.called and place.called) for inner in _contents(place.value, module)
                ]
        level = following


def _contents(value: Any, module: nn.Module) -> Iterator[Held]:
    if isinstance(value, types.MethodType):
        # A method of another module belongs to that module: a copied model shares closures with the model it came from.
        if value.__self__ is module:
            yield Held(value.__func__, None)
        elif not isinstance(value.__self__, _OPAQUE):
            yield Held(value.__func__, None)
            yield from _entries(value.__self__, called=True)
    elif isinstance(value, functools.partial):
        yield from _of_partial(value)
        yield from _entries(value, called=False)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
        for name in value.__code__.co_names:
            if callable(module.__dict__.get(name)):
                yield Held(module.__dict__[name], functools.partial(module.__dict__.__setitem__, name))
        yield from _entries(value, called=False)
    elif not isinstance(value, _OPAQUE):
        yield from _entries(value, called=True)


def _entries(value: Any, *, called: bool) -> Iterator[Held]:
    """The callable attributes of *value*. An attribute ``__wrapped__`` is not taken to be called."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, entry in list(attributes.items()):
            if callable(entry):
                yield Held(entry, functools.partial(attributes.__setitem__, name), called and name != "__wrapped__")


def _of_function(function: types.FunctionType) -> Iterator[Held]:
    for cell in function.__closure__ or ():
        try:
            yield Held(cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
        except ValueError:  # not filled yet
            continue


def _of_partial(partial: functools.partial[Any]) -> Iterator[Held]:
    yield Held(partial.func, functools.partial(_put_in_partial, partial, "func"))
    for number, value in enumerate(partial.args):
        yield Held(value, functools.partial(_put_in_partial, partial, number))
    for name, value in partial.keywords.items():
        yield Held(value, functools.partial(partial.keywords.__setitem__, name))


def _put_in_partial(partial: functools.partial[Any], where: str | int, value: Any) -> None:
    function, args = partial.func, list(partial.args)
    if isinstance(where, int):
        args[where] = value
    else:
        function = value
    partial.__setstate__((function, tuple(args), partial.keywords, partial.__dict__))  # type: ignore[attr-defined]
