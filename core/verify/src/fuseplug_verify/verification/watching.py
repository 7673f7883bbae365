"""Derives from what an original reads what must be watched, and what cannot be watched."""

from __future__ import annotations

import enum
import functools
import logging
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..reading import MISSING, Path, Reading, attribute, is_library
from ..reading.lookup import is_a, namespace
from ..safe_access import attributes_of, children_of
from ..watch import NOTHING, SCALARS, Bare, ById, Equal, Global, Method, Missing, Route, Same, Step, Term, Watch, freeze

_BY_IDENTITY = (
    property,
    type(functools.lru_cache(len)),
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
)
_UNCHANGING = (frozenset, range, slice)


@dataclass
class Dependence:
    """What an original depends on that the fused code does not read itself.

    Attributes:
        watch: What can be compared at each call.
        tensors: Tensors, which cannot be compared at each call: paths below the module.
        numbers: Numbers that the adapter says it reads: paths below the module.
        unseen: What could change without being noticed, described for the report.
    """

    watch: Watch = NOTHING
    tensors: list[Path] = field(default_factory=list)
    numbers: list[Path] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def dependence(
    reading: Reading, module: nn.Module | None, reads: Collection[str], called: Collection[Path]
) -> Dependence:
    """Sort what was read by how changes of it can be noticed.

    Args:
        reading: Of the original.
        module: The module whose method it is; ``None`` for a function.
        reads: What the adapter says it reads: names with dots.
        called: Paths of the children that the fused code calls, and which therefore see their own changes.
    """
    found = Dependence()
    if module is not None:
        _sort_attributes(found, reading, module, reads, called)
        methods = _methods(reading, module, reads, called)
        found.watch = found.watch.and_(*methods)
    outside = [*_looked_up(reading, called)]
    found.unseen += dict.fromkeys(each for each in outside if isinstance(each, str))
    found.watch = found.watch.and_(*dict.fromkeys(each for each in outside if not isinstance(each, str)))
    return found


def _sort_attributes(
    found: Dependence, reading: Reading, module: nn.Module, reads: Collection[str], called: Collection[Path]
) -> None:
    # What is called was read, too; but for what a loop takes from a list.
    for path, value in {**reading.reads, **reading.calls}.items():
        # Both modes are tried, so the flag is free.
        if not path or path[-1] == "training" or _below(path, called):
            continue
        if _is_named(path, reads):
            found.numbers += [path] if type(value) in (int, float) else []
            continue
        if is_a(value, functools.partial) and (terms := _of_partial(route_to(module, path), value)):
            found.watch = found.watch.and_(*terms)
            continue
        term = _term(reading, module, path, value)
        if term == "tensor":
            found.tensors.append(path)
        elif isinstance(term, str):
            found.unseen.append(f"{'.'.join(path)}, {term}")
        elif term is not None:
            found.watch = found.watch.and_(term)


def _methods(reading: Reading, module: nn.Module, reads: Collection[str], called: Collection[Path]) -> Iterator[Method]:
    for (path, name), function in reading.methods.items():
        if _below(path, called) or _is_named((*path, name), reads) or not _is_watched(function):
            continue
        if (route := route_to(module, path)) is None:
            continue
        # One of a base class, reached by super(), is not what the name means on the module.
        held = attribute(type(_at(module, path)), name)
        if (held.__func__ if is_a(held, staticmethod) else held) is function:
            yield Method(route, name, ById(function))


def _is_named(path: Path, reads: Collection[str]) -> bool:
    """Whether *path* is one of *reads*, where ``"*"`` is any item of a list."""
    names = (name.split(".") for name in reads)
    return any(len(each) == len(path) and all(a in (b, "*") for a, b in zip(each, path, strict=True)) for each in names)


def _below(path: Path, above: Collection[Path]) -> bool:
    return any(path[:count] in above for count in range(1, len(path) + 1))


def _of_partial(route: Route | None, value: functools.partial[Any]) -> tuple[Term, ...]:
    """What to watch of a partial with scalars: the object, and its keywords, which may be changed in place."""
    keywords = freeze(dict(value.keywords))
    if route is None or keywords is None or freeze(value.args) is None:
        return ()
    return Same(route, ById(value)), Equal((*route, Step("keywords", "object")), keywords)


def _term(reading: Reading, module: nn.Module, path: Path, value: Any) -> Term | str | None:
    """What to watch of *value* at *path*; ``"tensor"``; a description, if it may change unnoticed; or ``None``."""
    route = route_to(module, path)
    if route is None:
        return None  # Reached through an object whose own place is watched.
    if value is MISSING:
        return Missing(route)
    if is_a(value, nn.Module):
        return Bare(route, type(value)) if path in reading.calls else None
    if is_a(value, torch.Tensor):
        return "tensor"
    if (frozen := freeze(value)) is not None:
        return Equal(route, frozen)
    if not is_a(value, _BY_IDENTITY):
        if any(len(other) > len(path) and other[: len(path)] == path for other in reading.reads):
            return None  # What is read from it is listed by itself.
        if _may_change(value):
            return f"a {type(value).__name__} that may change"
    if (method := _bound(module, path, value)) is not None:
        return method
    # What the class has is found by `Reading.methods`.
    return Same(route, ById(value)) if _is_own(module, path) else None


def _bound(module: nn.Module, path: Path, value: Any) -> Method | None:
    """What to watch of a method of the class that the instance holds bound, as after transformers' ``kernelize``."""
    owner, name, route = _at(module, path[:-1]), path[-1], route_to(module, path[:-1])
    if route is None or not is_a(value, types.MethodType) or value.__self__ is not owner:
        return None
    return Method(route, name, ById(value.__func__)) if value.__func__ is attribute(type(owner), name) else None


def _at(module: nn.Module, path: Path) -> Any:
    """What is at *path*; of a list of modules, in the first of them."""
    found: Any = module
    for name in path:
        found = next(iter(children_of(found).values()), None) if name == "*" else attribute(found, name)
    return found


def _is_own(module: nn.Module, path: Path) -> bool:
    """Whether the last name of *path* belongs to the instance there, and not to its class."""
    owner = _at(module, path[:-1])
    if is_a(owner, nn.Module):
        return path[-1] in attributes_of(owner) or path[-1] in children_of(owner)
    return path[-1] in namespace(owner)


def route_to(module: nn.Module, path: Path) -> Route | None:
    """The steps to *path*; ``None`` if one of them leads through something without attributes."""
    owner: Any = module
    steps: list[Step] = []
    for number, name in enumerate(path):
        if name == "*":
            items = [*children_of(owner).values()]
            steps.append(Step("*", len(items)))
            owner = items[0] if items else None
            continue
        if is_a(owner, nn.Module):
            stores = ("_modules", "_parameters", "_buffers")
            held = attributes_of(owner)
            steps.append(Step(name, next((store for store in stores if name in held[store]), "plain")))
        elif owner is None or is_a(owner, torch.Tensor) or owner is MISSING:
            return None
        else:
            steps.append(Step(name, "object"))
        owner = attribute(owner, name)
        if owner is MISSING and number < len(path) - 1:
            return None
    return tuple(steps)


def _looked_up(reading: Reading, called: Collection[Path]) -> Iterator[Global | str]:
    """What was looked up in Python modules and closures; or a description of what may change unnoticed.

    A cell of a closure is a namespace with one name.
    """
    indexed = {id(looked.space) for looked in reading.globals}
    for looked in reading.globals:
        space, name, value = looked.space, looked.name, looked.value
        if _below(looked.inside, called):
            continue
        if not (in_cell := isinstance(space, types.CellType)):
            # What is found in a namespace is listed by itself.
            if id(value) in indexed or is_a(value, logging.Logger | types.ModuleType):
                continue
            if _is_torchs(space.get("__name__")):
                continue
        # A name of a model's may come to stand for another, even if what it stands for is torch's own.
        if value is not MISSING and not is_a(value, _BY_IDENTITY):
            if (frozen := freeze(value)) is not None:
                yield Global(ById(space), name, frozen)
                continue
            if _may_change(value) or is_a(value, torch.Tensor):
                what = "a tensor" if is_a(value, torch.Tensor) else f"a {type(value).__name__} that may change"
                yield f"what {name} holds, {what}" if in_cell else f"the global {name}, {what}"
                continue
        yield Global(ById(space), name, ById(value))


def _may_change(value: Any) -> bool:
    """Whether *value* can change and stay the same object. Attributes of a model's own classes are read one by one."""
    if is_a(value, tuple):
        return any(_may_change(each) for each in value)
    if is_a(value, (*_UNCHANGING, *SCALARS, *_BY_IDENTITY, enum.Enum, nn.Module, torch.Tensor)):
        return False
    return is_library(value)


def _is_watched(value: Any) -> bool:
    """Whether to expect that *value* is replaced. Functions and classes of torch and Python are not."""
    return not (_is_torchs(getattr(value, "__module__", "")) or getattr(value, "__module__", "") == "builtins")


def _is_torchs(name: Any) -> bool:
    return str(name or "").partition(".")[0] == "torch"
