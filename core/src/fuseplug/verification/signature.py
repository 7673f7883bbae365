"""When do two modules certainly behave alike?"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from .twin import HOOKS, INSTANCE_ONLY

_BY_VALUE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
_SMALL = 1 << 16
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


def signature(module: nn.Module) -> Hashable:
    """A value that is equal for two modules only if they compute the same function of inputs and parameters.

    It holds the class; every attribute, scalars, containers and small tensors by value and everything else by identity;
    names, shapes and dtypes of parameters; buffers as attributes; the same of all children. Valid as long as the
    modules live and are not changed.
    """
    attributes = tuple(
        (name, _value(value))
        for name, value in sorted(module.__dict__.items())
        if name not in HOOKS and name not in INSTANCE_ONLY and name not in _REGISTERED
    )
    parameters = tuple(
        (name, parameter if parameter is None else (getattr(parameter, "ds_shape", parameter.shape), parameter.dtype))
        for name, parameter in module._parameters.items()
    )
    buffers = tuple((name, _value(buffer)) for name, buffer in module._buffers.items())
    children = tuple((name, None if child is None else signature(child)) for name, child in module._modules.items())
    return (type(module), attributes, parameters, buffers, children)


def _value(value: Any) -> Hashable:
    if isinstance(value, _BY_VALUE):
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
    if value.numel() > _SMALL:
        return (*kind, id(value))
    return (*kind, value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
