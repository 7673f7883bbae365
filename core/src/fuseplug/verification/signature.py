"""When do two modules certainly behave alike?"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

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
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, int] = {}

    def of(self, module: nn.Module) -> int:
        """The number of *module*."""
        number = self._known.get(id(module))
        if number is None:
            # A number for each level keeps what is compared small, however deep the module.
            number = self._numbers.setdefault(self._describe(module), len(self._numbers))
            self._known[id(module)] = number
        return number

    def _describe(self, module: nn.Module) -> Hashable:
        if isinstance(module, torch.jit.ScriptModule):
            return ("identity", id(module))
        attributes = [
            (name, type(value), value) if type(value) in _SCALARS else (name, _value(value))
            for name, value in module.__dict__.items()
            if name not in _IGNORED
        ]
        parameters = [
            (name, None if parameter is None else (getattr(parameter, "ds_shape", parameter.shape), parameter.dtype))
            for name, parameter in module._parameters.items()
        ]
        buffers = [(name, _value(buffer)) for name, buffer in module._buffers.items()]
        children = [(name, None if child is None else self.of(child)) for name, child in module._modules.items()]
        return (type(module), tuple(attributes), tuple(parameters), tuple(buffers), tuple(children))


def _value(value: Any) -> Hashable:
    if type(value) in _SCALARS or isinstance(value, enum.Enum):
        # 1, 1.0 and True are equal to Python and not to a forward.
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if type(value) in (list, tuple):
        return (type(value), tuple(_value(item) for item in value))
    if type(value) in (set, frozenset):
        return (type(value), frozenset(_value(item) for item in value))
    if type(value) is dict:
        return (dict, tuple((_value(key), _value(item)) for key, item in value.items()))
    return ("identity", id(value))


def _tensor(value: torch.Tensor) -> Hashable:
    # What a forward reads from a buffer is part of what it computes: a per-layer scale must not be taken for another's.
    kind = (tuple(value.shape), value.dtype)
    if value.is_meta:
        return kind
    if value.numel() > _SMALL or value.dtype.is_complex or type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return (*kind, id(value))
    return (*kind, value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
