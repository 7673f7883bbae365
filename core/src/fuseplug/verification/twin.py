"""Copies of a module that share its class and attributes but none of its tensors, hooks or patches.

Everything Fuseplug wants to know of a module it asks of such a copy, so that the live one is never touched: whether it
is sharded, offloaded, on meta, hooked or wrapped makes no difference, and any thread may ask.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Container
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..words import Example
from .signature import HOOKS, INSTANCE_ONLY, Signatures

CONTAINERS = (list, tuple, dict, set, frozenset)
_REGISTRIES = HOOKS | {"_parameters", "_buffers", "_modules"}


class StandIns:
    """Makes copies whose tensors have a shape and a dtype but no values, one for each module.

    Args:
        signatures: Says which modules are alike: their stand-ins share what they need not have apart.
    """

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures
        self._attributes: dict[int, dict[str, Any]] = {}
        self._made: dict[int, nn.Module] = {}

    def of(self, module: nn.Module) -> nn.Module:
        """The stand-in of *module*, those of all below it included.

        For TorchScript, which cannot be copied so, an empty module stands in.
        """
        made = self._made.get(id(module))
        if made is None:
            made = self._made[id(module)] = self._make(module)
        return made

    def _make(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return nn.Module()
        number = self._signatures.of(module)
        if number not in self._attributes:
            self._attributes[number] = _attributes(module)
        children = {name: None if child is None else self.of(child) for name, child in module._modules.items()}
        return _instance(module, self._attributes[number] | {"_modules": children})


def stand_in(module: nn.Module, without: Container[str] = ()) -> nn.Module:
    """A stand-in that shares nothing with any other; for its children in *without* there is none."""
    if isinstance(module, torch.jit.ScriptModule):
        return nn.Module()
    children = {
        name: None if child is None or name in without else stand_in(child) for name, child in module._modules.items()
    }
    return _instance(module, _attributes(module) | {"_modules": children})


def twin(module: nn.Module, example: Example) -> nn.Module:
    """A runnable copy of *module* on the CPU, with what *example* has for its tensors, attributes and children.

    Buffers and attributes that it does not name keep their values; parameters that it does not name have none.
    """
    copy = stand_in(module, without=example.children)
    copy._modules.update((name, deepcopy(child)) for name, child in example.children.items())
    for name, value in module.__dict__.items():
        if type(value) in CONTAINERS and name in copy.__dict__ and name not in _REGISTRIES:
            copy.__dict__[name] = mapped(value, lambda tensor: tensor.detach().cpu().clone())
    for name, value in own_tensors(module).items():
        if name not in module._parameters and not value.is_meta:
            registry: dict[str, Any] = copy._buffers if name in copy._buffers else copy.__dict__
            registry[name] = value.detach().cpu().clone()
    for name, value in example.parameters.items():
        if name in copy._parameters:
            copy._parameters[name] = nn.Parameter(value)
        elif name in copy._buffers:
            copy._buffers[name] = value
        else:
            copy.__dict__[name] = value
    copy.__dict__.update(example.attributes)
    return copy


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and plain tensor attributes (where FSDP keeps its views) of *module* itself, by name."""
    attributes = {name: value for name, value in module.__dict__.items() if isinstance(value, Tensor)}
    registered = {**module._parameters, **module._buffers}
    return {**{name: value for name, value in registered.items() if value is not None}, **attributes}


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of *value*, plain containers included, with every tensor in them changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    return type(value)(mapped(item, change) for item in value) if type(value) in CONTAINERS else value


def _instance(module: nn.Module, attributes: dict[str, Any]) -> nn.Module:
    # Neither __init__, which may do anything, nor __setattr__, which does more than set in torch.compile's wrapper.
    copy = object.__new__(type(module))
    for name, value in attributes.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            attributes[name] = types.MethodType(value.__func__, copy)
    object.__setattr__(copy, "__dict__", attributes)
    return copy


def _attributes(module: nn.Module) -> dict[str, Any]:
    attributes = {
        name: value if name in _REGISTRIES else mapped(value, _valueless)
        for name, value in module.__dict__.items()
        if name not in INSTANCE_ONLY
    }
    attributes |= {name: {} for name in HOOKS if attributes.get(name) is not None}
    attributes["_parameters"] = {
        name: parameter if parameter is None else _valueless_parameter(parameter)
        for name, parameter in module._parameters.items()
    }
    attributes["_buffers"] = {name: b if b is None else _valueless(b) for name, b in module._buffers.items()}
    return attributes


def _valueless(tensor: Tensor) -> Tensor:
    # DeepSpeed's ZeRO-3 leaves an empty tensor behind, with the true shape beside it.
    return torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")


def _valueless_parameter(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(_valueless(parameter), parameter.is_floating_point() or parameter.is_complex())
