"""Makes copies of modules without values, for kernels to look at, and finds modules that certainly behave alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..data import Refusal
from ..safe_access import attributes_of, children_of, said_by
from ..watch import CONTAINERS, SCALARS
from .copying import Copying, UncopyableError
from .memory import not_dense, readable
from .twin import NOT_COMPUTED, copied_attributes, copied_tensors, fill, valueless

_SMALL = 1 << 16
_DEEP = 4
"""Containers inside this many others are compared by identity."""


class StandIns:
    """Makes copies whose tensors have a shape and a dtype but no values, one for each module, and says which are alike.

    Stand-ins of modules that are alike share what need not be separate. An instance is valid as long as the modules
    live and are not changed.
    """

    def __init__(self) -> None:
        self._faults: dict[int, Exception] = {}
        self._stand_ins: dict[int, nn.Module] = {}
        self._attributes: dict[int, dict[str, Any]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._likenesses: dict[int, int] = {}
        self._copying = Copying(valueless, self.of)

    def of(self, module: nn.Module) -> nn.Module:
        """The stand-in of *module*, including those of all modules below it.

        An empty module stands in for a module of TorchScript, which cannot be copied in this way, and for a module that
        cannot be read.
        """
        if id(module) not in self._stand_ins:
            try:
                self._make(module)
            except Exception as error:  # noqa: BLE001 - a third party's class may raise anything
                self._faults[id(module)] = error
                self._stand_ins[id(module)] = nn.Module()
        return self._stand_ins[id(module)]

    def likeness(self, module: nn.Module) -> int:
        """A number that is equal for two modules only if both compute the same function of inputs and parameters.

        It depends on the class; every attribute, scalars, containers and small tensors by value, everything else by
        identity; names, shapes and dtypes of parameters; buffers, like attributes; and the numbers of all children.
        """
        number = self._likenesses.get(id(module))
        if number is None:
            # For a descendant that refers to this module: a module in such a cycle is like no other.
            alone = self._likenesses[id(module)] = self._number(("identity", id(module)))
            try:
                # A number for each level keeps descriptions small, however deep the module is.
                number = self._number(self._describe(module))
            except Exception as error:  # noqa: BLE001 - a third party's attributes may raise anything
                self._faults[id(module)] = error
                number = alone
            self._likenesses[id(module)] = number
        return number

    def fault(self, module: nn.Module) -> Refusal | None:
        """Why *module*, whose stand-in was made, cannot be read or copied, so that the stand-in is an empty module."""
        error = self._faults.get(id(module))
        if error is None:
            return None
        if isinstance(error, UncopyableError):
            return Refusal(str(error), kind="unsupported")
        return Refusal(said_by(error), kind="error")

    def _make(self, module: nn.Module) -> None:
        number = self.likeness(module)
        if issubclass(type(module), torch.jit.ScriptModule) or id(module) in self._faults:
            self._stand_ins[id(module)] = nn.Module()
            return
        # Before the stand-ins of its children, one of which may refer to it.
        copy = self._stand_ins[id(module)] = object.__new__(type(module))
        if number not in self._attributes:
            tensors = copied_tensors(module, valueless, valueless)
            self._attributes[number] = copied_attributes(module, self._copying) | tensors
        children = {name: None if child is None else self.of(child) for name, child in children_of(module).items()}
        fill(copy, self._attributes[number] | {"_modules": children})

    def _number(self, description: Hashable) -> int:
        return self._numbers.setdefault(description, len(self._numbers))

    def _describe(self, module: nn.Module) -> Hashable:
        if issubclass(type(module), torch.jit.ScriptModule):
            return ("identity", id(module))
        state, below = attributes_of(module), children_of(module)
        _must_have_shapes(state)
        attributes = [(name, _value(value)) for name, value in state.items() if name not in NOT_COMPUTED]
        children = [(name, None if child is None else self.likeness(child)) for name, child in below.items()]
        parameters = [(name, None if value is None else _kind(value)) for name, value in state["_parameters"].items()]
        buffers = [(name, _value(buffer)) for name, buffer in state["_buffers"].items()]
        return (type(module), tuple(attributes), tuple(parameters), tuple(buffers), tuple(children))


def _must_have_shapes(state: Mapping[str, Any]) -> None:
    for registry in (state["_parameters"], state["_buffers"]):
        for name, tensor in registry.items():
            if is_lazy(tensor):
                raise UncopyableError(
                    f"its {name} is lazy, without a shape yet: run the model once, then call apply_all again"
                )


def _value(value: Any, within: int = 0) -> Hashable:
    kind = type(value)
    if kind in SCALARS:
        # 1, 1.0 and True are equal to Python, but not to a forward.
        return (kind, value)
    if issubclass(kind, torch.Tensor):
        return _tensor(value)
    if kind not in CONTAINERS or within == _DEEP:
        return ("identity", id(value))
    if kind is dict:
        return (kind, tuple((_value(key, within + 1), _value(item, within + 1)) for key, item in value.items()))
    items = (_value(item, within + 1) for item in value)
    return (kind, frozenset(items) if kind in (set, frozenset) else tuple(items))


def _kind(tensor: torch.Tensor) -> Hashable:
    """The shape and dtype of *tensor*; a tensor that is not dense is like nothing else."""
    return ("identity", id(tensor)) if not_dense(tensor) else (getattr(tensor, "ds_shape", tensor.shape), tensor.dtype)


def _tensor(value: torch.Tensor) -> Hashable:
    # The values of a buffer are part of what a forward computes: one layer's scale must not pass for another's.
    if not_dense(value):
        return ("identity", id(value))
    kind = (tuple(value.shape), value.dtype)
    if value.is_meta:
        return kind
    plain = type(value) in (torch.Tensor, nn.Parameter, nn.Buffer)
    if value.numel() > _SMALL or value.dtype.is_complex or not plain or not readable(value):
        return (*kind, id(value))
    # Through a list, which needs no numpy: torch may be installed without it.
    return (*kind, bytes(value.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()))
