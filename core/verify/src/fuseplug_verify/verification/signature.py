"""Finds modules that certainly behave alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..safe_access import attributes_of, children_of
from .copying import UncopyableError
from .memory import dense, readable

HOOKS = frozenset(name for name in nn.Module().__dict__ if name.endswith("_hooks") or "_hooks_" in name)
INSTANCE_ONLY = frozenset(
    {"forward", "_old_forward", "_hf_hook", "_compiled_call_impl", "_replicate_for_data_parallel"}
)
"""What hangs on an instance without being part of what it computes: patches, hooks, compiled calls."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_IGNORED = HOOKS | INSTANCE_ONLY | {"_parameters", "_buffers", "_modules"}
_SMALL = 1 << 16


class Signatures:
    """Numbers that are equal for two modules only if both compute the same function of inputs and parameters.

    Behind a number stand the class; every attribute, scalars, containers and small tensors by value and everything else
    by identity; names, shapes and dtypes of parameters; buffers as attributes; the numbers of all children. Numbers
    hold as long as the modules live and are not changed, so one `Signatures` serves one plan.

    Attributes:
        faults: By the ``id`` of a module that cannot be examined, what it raised. It is like no other module.
    """

    def __init__(self) -> None:
        self.faults: dict[int, Exception] = {}
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, int] = {}

    def of(self, module: nn.Module) -> int:
        """The number of *module*."""
        number = self._known.get(id(module))
        if number is None:
            # For a descendant that refers to it: nothing else is like what goes round in a circle.
            alone = self._known[id(module)] = self._number(("identity", id(module)))
            try:
                # A number for each level keeps what is compared small, however deep the module.
                number = self._number(self._describe(module))
            except Exception as error:  # noqa: BLE001 - a third party's attributes may raise anything
                self.faults[id(module)] = error
                number = alone
            self._known[id(module)] = number
        return number

    def _number(self, description: Hashable) -> int:
        return self._numbers.setdefault(description, len(self._numbers))

    def _describe(self, module: nn.Module) -> Hashable:
        if issubclass(type(module), torch.jit.ScriptModule):
            return ("identity", id(module))
        held, below = attributes_of(module), children_of(module)
        _must_have_shapes(held)
        within: dict[int, Hashable] = {}
        attributes = [
            (name, type(value), value) if type(value) in _SCALARS else (name, self._value(value, within))
            for name, value in held.items()
            if name not in _IGNORED
        ]
        children = [(name, None if child is None else self.of(child)) for name, child in below.items()]
        parameters = [
            (name, None if parameter is None else _kind(parameter)) for name, parameter in held["_parameters"].items()
        ]
        buffers = [(name, self._value(buffer, within)) for name, buffer in held["_buffers"].items()]
        return (type(module), tuple(attributes), tuple(parameters), tuple(buffers), tuple(children))

    def _value(self, value: Any, within: dict[int, Hashable]) -> Hashable:
        kind = type(value)
        if kind in _SCALARS:
            # 1, 1.0 and True are equal to Python and not to a forward.
            return (kind, value)
        if issubclass(kind, torch.Tensor):
            return _tensor(value)
        if kind not in _CONTAINERS:
            return ("identity", id(value))
        if id(value) not in within:
            # Known before its items, one of which may be the container itself.
            within[id(value)] = ("identity", id(value))
            within[id(value)] = self._number((kind, self._items(kind, value, within)))
        return (kind, within[id(value)])

    def _items(self, kind: type, value: Any, within: dict[int, Hashable]) -> Hashable:
        if kind is dict:
            return tuple((self._value(key, within), self._value(item, within)) for key, item in value.items())
        items = (self._value(item, within) for item in value)
        return frozenset(items) if kind in (set, frozenset) else tuple(items)


def _must_have_shapes(held: Mapping[str, Any]) -> None:
    for registry in (held["_parameters"], held["_buffers"]):
        for name, tensor in registry.items():
            if is_lazy(tensor):
                raise UncopyableError(
                    f"its {name} is lazy, without a shape yet: run the model once, then call apply_all again"
                )


_CONTAINERS = frozenset({list, tuple, set, frozenset, dict})


def _kind(tensor: torch.Tensor) -> Hashable:
    """Shape and dtype, as far as there is a shape; what is not dense is like nothing else."""
    return (getattr(tensor, "ds_shape", tensor.shape), tensor.dtype) if dense(tensor) else ("identity", id(tensor))


def _tensor(value: torch.Tensor) -> Hashable:
    # What a forward reads from a buffer is part of what it computes: a per-layer scale must not be taken for another's.
    if not dense(value):
        return ("identity", id(value))
    kind = (tuple(value.shape), value.dtype)
    if value.is_meta:
        return kind
    plain = type(value) in (torch.Tensor, nn.Parameter, nn.Buffer)
    if value.numel() > _SMALL or value.dtype.is_complex or not plain or not readable(value):
        return (*kind, id(value))
    # By a list, which needs no numpy: torch is installed without it.
    return (*kind, bytes(value.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()))
