"""Derives what must be watched, and what cannot be watched, from what an original reads."""

from __future__ import annotations

import enum
import functools
import logging
import types
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..reading.findings import MISSING, Looked, Path, Reading
from ..reading.libraries import is_library
from ..reading.lookup import Memoised, attribute, is_a, namespace
from ..safe_access import attributes_of, children_of
from ..watch import SCALARS, Expected, Route, RouteStep, Term

_BY_IDENTITY = (
    property,
    Memoised,
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
        terms: What can be compared at each call.
        tensors: Tensors, which cannot be compared at each call: paths below the module.
        unseen: What could change without being noticed, described for the report.
    """

    terms: list[Term] = field(default_factory=list)
    tensors: list[Path] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def dependence(
    reading: Reading, module: nn.Module | None, reads: Collection[str], called: Collection[Path]
) -> Dependence:
    """Sort everything that was read by how its changes can be noticed.

    Args:
        reading: The reading of the original.
        module: The module whose method the original is; ``None`` for a function.
        reads: What the adapter says that it reads, as dotted names.
        called: The paths of the children that the fused code calls, and which therefore see their own changes.
    """
    depends = Dependence()
    if module is not None:
        for path, value in reading.reads.items():
            # Both modes are tried, so the flag of a module may change.
            is_flag = path[-1:] == ("training",) and is_a(walked(module, path[:-1])[1], nn.Module)
            if not path or is_flag or is_below(path, called):
                continue
            if not _is_named(path, reads):
                _sort_attribute(depends, reading, module, path, value)
            elif type(value) in (int, float) and (route := walked(module, path)[0]):
                # A tensor in its place may want a gradient, which no kernel has for a number.
                depends.terms.append(Term("number", Expected.same(float), route))
        for (path, name), function in reading.methods.items():
            # Methods of torch's own are not expected to be replaced.
            if not (is_below(path, called) or _is_named((*path, name), reads) or _is_torchs(function.__module__)):
                _sort_method(depends, module, path, name, function)
    spaces = {id(looked.space) for looked in reading.globals}
    for looked in reading.globals:
        # A namespace is not watched itself: what is looked up in it is in the list, too.
        if not is_below(looked.inside, called) and (_is_cell(looked) or id(looked.value) not in spaces):
            _sort_global(depends, looked)
    depends.terms = [*dict.fromkeys(depends.terms)]
    depends.unseen = [*dict.fromkeys(depends.unseen)]
    return depends


def _is_named(path: Path, reads: Collection[str]) -> bool:
    """Whether *path* is one of *reads*, where ``"*"`` is any item of a list."""
    patterns = (name.split(".") for name in reads)
    return any(
        len(names) == len(path) and all(a in (b, "*") for a, b in zip(names, path, strict=True)) for names in patterns
    )


def is_below(path: Path, above: Collection[Path]) -> bool:
    """Whether *path* is one of *above*, or leads on from one."""
    return any(path[:count] in above for count in range(1, len(path) + 1))


def _sort_attribute(depends: Dependence, reading: Reading, module: nn.Module, path: Path, value: Any) -> None:
    route, _ = walked(module, path)
    if route is None:
        return  # It is reached through an object whose own place is watched.
    expected = Expected.same(value) if value is MISSING else Expected.equal(value)
    if expected is not None:
        depends.terms.append(Term("attribute", expected, route))
    elif is_a(value, torch.Tensor):
        depends.tensors.append(path)
    elif is_a(value, nn.Module):
        if path in reading.calls:
            depends.terms.append(Term("bare", Expected.same(type(value)), route))
    elif is_a(value, functools.partial) and Expected.equal(value.args) and (named := Expected.equal(value.keywords)):
        # Its keywords may be changed in place.
        depends.terms.append(Term("attribute", Expected.same(value), route))
        depends.terms.append(Term("attribute", named, (*route, RouteStep("keywords", "object"))))
    else:
        _sort_object(depends, reading, module, path, route, value)


def _sort_object(
    depends: Dependence, reading: Reading, module: nn.Module, path: Path, route: Route, value: Any
) -> None:
    """Sort an attribute that is compared by identity, or that may change unnoticed."""
    # What is read from the object is listed by itself.
    looked_into = any(len(other) > len(path) and other[: len(path)] == path for other in reading.reads)
    if not is_a(value, _BY_IDENTITY) and looked_into:
        return
    if _may_change(value):
        depends.unseen.append(f"{'.'.join(path)}, a {type(value).__name__} that may change")
        return
    _, owner = walked(module, path[:-1])
    name = path[-1]
    if is_a(value, types.MethodType) and value.__self__ is owner and value.__func__ is attribute(type(owner), name):
        # A method of the class that the instance holds bound, as after transformers' ``kernelize``.
        depends.terms.append(Term("method", Expected.same(value.__func__), route[:-1], name))
    elif name in namespace(owner):  # `Reading.methods` has what the class defines.
        depends.terms.append(Term("attribute", Expected.same(value), route))


def _sort_method(depends: Dependence, module: nn.Module, path: Path, name: str, function: types.FunctionType) -> None:
    route, owner = walked(module, path)
    member = attribute(type(owner), name)
    # A method of a base class, reached by super(), is not what the name means on the module.
    if route is not None and (member.__func__ if is_a(member, staticmethod) else member) is function:
        depends.terms.append(Term("method", Expected.same(function), route, name))


def _sort_global(depends: Dependence, looked: Looked) -> None:
    """Sort what was looked up in a Python module, or in a closure cell, which is a namespace with one name."""
    name, value = looked.name, looked.value
    if not (in_cell := _is_cell(looked)):
        module = looked.space.get("__name__")  # type: ignore[union-attr]
        if is_a(value, (logging.Logger, types.ModuleType)) or _is_torchs(module):
            return
    expected = Expected.same(value)
    # A global of a model's Python module may get another value, even if its value now is torch's own.
    if value is not MISSING and not is_a(value, _BY_IDENTITY):
        expected = Expected.equal(value) or expected
        if not expected.by_value and (_may_change(value) or is_a(value, torch.Tensor)):
            what = "a tensor" if is_a(value, torch.Tensor) else f"a {type(value).__name__} that may change"
            depends.unseen.append(f"what {name} holds, {what}" if in_cell else f"the global {name}, {what}")
            return
    depends.terms.append(Term("global", expected, name=name, space=Expected(looked.space, looked.number)))


def walked(module: nn.Module, path: Path) -> tuple[Route | None, Any]:
    """The steps to *path*, and what is there; of the modules of a list, in the first.

    The steps are ``None`` if one of them leads through something without attributes.
    """
    owner: Any = module
    steps: list[RouteStep] = []
    for name in path:
        if owner is None or owner is MISSING or is_a(owner, torch.Tensor):
            return None, MISSING
        if name == "*":
            items = [*children_of(owner).values()]
            steps.append(RouteStep("*", len(items)))
            owner = items[0] if items else MISSING
            continue
        store = "object"
        if is_a(owner, nn.Module):
            stores = ("_modules", "_parameters", "_buffers")
            store = next((store for store in stores if name in attributes_of(owner)[store]), "plain")
        steps.append(RouteStep(name, store))
        owner = attribute(owner, name)
    return tuple(steps), owner


def _may_change(value: Any) -> bool:
    """Whether *value* can change in place. Objects of a model do not count: their attributes are read one by one."""
    if is_a(value, tuple):
        return any(map(_may_change, value))
    if is_a(value, (*_UNCHANGING, *SCALARS, *_BY_IDENTITY, enum.Enum, nn.Module, torch.Tensor)):
        return False
    return is_library(value)


def _is_cell(looked: Looked) -> bool:
    return isinstance(looked.space, types.CellType)


def _is_torchs(name: Any) -> bool:
    return str(name or "").partition(".")[0] == "torch"
