"""Binds the replaced methods of a module to its ``nn.DataParallel`` replicas, which copy the module's attributes."""

from __future__ import annotations

import types

from torch import nn

from .slots import attributes_of

NAME = "_replicate_for_data_parallel"


def _replicate_for_data_parallel(module: nn.Module) -> nn.Module:
    """Make a replica as the class does, and bind to it the methods that the instance itself holds.

    Otherwise a replica would run these methods on the module it was made from, which is on another device.
    """
    replica: nn.Module = getattr(type(module), NAME)(module)
    for name, value in replica.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            replica.__dict__[name] = types.MethodType(value.__func__, replica)
    return replica


def make_replicable(module: nn.Module) -> None:
    """Make replicas of *module* run its replaced methods on themselves."""
    attributes_of(module).setdefault(NAME, types.MethodType(_replicate_for_data_parallel, module))


def leave_replicas(module: nn.Module) -> None:
    """Undo `make_replicable`."""
    attributes = attributes_of(module)
    if getattr(attributes.get(NAME), "__func__", None) is _replicate_for_data_parallel:
        del attributes[NAME]
