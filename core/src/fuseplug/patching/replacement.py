"""What is put in the place of a method or function: the kernel's adapter behind a guard."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..rebind import rebound
from ..words import Adapter, Compute, Target

# By identity, not as attributes: functools.wraps copies those onto what somebody else puts around ours.
_marks: weakref.WeakKeyDictionary[Callable[..., Any], Mark] = weakref.WeakKeyDictionary()
_composed: weakref.WeakKeyDictionary[Callable[..., Any], dict[Target, Callable[..., Any]]] = weakref.WeakKeyDictionary()
_made: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()
_making = threading.Lock()
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class Mark:
    """What a replacement says of itself, so that ours is recognised wherever it turns up: copies of models included."""

    kernel_id: str
    variant: str
    target: Target
    device_type: str


@dataclass(frozen=True)
class Accepts:
    """The calls that were verified; every other goes to the original.

    Attributes:
        dtypes: Of the main input.
        arities: Numbers of arguments, the module not counted.
    """

    dtypes: tuple[torch.dtype, ...]
    arities: tuple[int, ...]


def replacement(
    original: Callable[..., Any], adapter: Adapter, compute: Compute, mark: Mark, accepts: Accepts
) -> Callable[..., Any]:
    """The function to put in the place of *original*; the same object for the same arguments, as long as it is in use.

    ``torch.compile`` compiles a function once however many modules share it, and once for each function however alike.
    """
    key = (original, adapter, compute, mark, accepts)
    with _making:
        if key not in _made:
            made = _guarded(original, adapter.bind(compute), mark, accepts)
            _marks[made] = mark
            _made[key] = made
            return made
        return _made[key]


def compose(method: types.FunctionType, parts: Mapping[Target, Callable[..., Any]]) -> types.FunctionType:
    """What goes into the slot of *method*: its replacement, or its copy with functions replaced."""
    for target, part in parts.items():
        if target.function is None:
            part.__name__ = target.method
            return cast("types.FunctionType", part)
    copy = rebound(method, {str(target.function): part for target, part in parts.items()})
    # A pickle finds a bound method by this name, and some decorators leave another.
    copy.__name__ = next(iter(parts)).method
    _composed[copy] = dict(parts)
    return copy


def parts(function: Any) -> dict[Target, Callable[..., Any]]:
    """The replacements that *function*, made by `compose`, consists of; empty if it is not ours."""
    if not isinstance(function, types.FunctionType):
        return {}
    if function in _composed:
        return dict(_composed[function])
    return {_marks[function].target: function} if function in _marks else {}


def mark_of(part: Callable[..., Any]) -> Mark:
    """What a replacement says of itself."""
    return _marks[part]


def _guarded(
    original: Callable[..., Any], fused: Callable[..., Any], mark: Mark, accepts: Accepts
) -> Callable[..., Any]:
    device_type, dtypes = mark.device_type, accepts.dtypes
    first = 1 if mark.target.function is None else 0
    lengths = tuple(first + arity for arity in accepts.arities)
    names, defaults = _positional_parameters(original)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        # The original gets the call as it was made: what it wraps may look at its keywords.
        values, rest = _in_place(args, kwargs, names, defaults) if kwargs else (args, kwargs)
        if len(values) in lengths and not rest:
            x = values[first]
            # Exactly these: a kernel was never run on a FakeTensor, a DTensor or what else is derived from them.
            if type(x) in _PLAIN and x.device.type == device_type and x.dtype in dtypes:
                return fused(*values)
        return original(*args, **kwargs)

    return replaced


def _positional_parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return tuple(p.name for p in parameters), defaults


def _in_place(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], defaults: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Adapters are written with names of their own, and models call by the names of theirs.
    values, rest = list(args), dict(kwargs)
    for name in names[len(args) :]:
        if not any(later in rest for later in names[len(values) :]):
            break
        if name in rest:
            values.append(rest.pop(name))
        elif name in defaults:
            values.append(defaults[name])
        else:
            return args, kwargs
    return tuple(values), rest
