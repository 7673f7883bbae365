"""Replicas of ``nn.DataParallel`` copy a module's attributes; here their replaced methods are bound to the copy."""

from __future__ import annotations

import types

from torch import nn

from .slots import attributes_of

NAME = "_replicate_for_data_parallel"


def _replicate_for_data_parallel(module: nn.Module) -> nn.Module:
    """Make a replica as the class does, and bind to it what the instance holds as its own methods.

    Otherwise a replica would run them on the module that it was made of, which is on another device.
    """
    replica: nn.Module = getattr(type(module), NAME)(module)
    for name, value in replica.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            replica.__dict__[name] = types.MethodType(value.__func__, replica)
    return replica


def make_replicable(module: nn.Module) -> None:
    """Make replicas of *module* call the replaced methods of the instance on themselves."""
    attributes_of(module).setdefault(NAME, types.MethodType(_replicate_for_data_parallel, module))


def leave_replicas(module: nn.Module) -> None:
    """Undo `make_replicable`."""
    attributes = attributes_of(module)
    if getattr(attributes.get(NAME), "__func__", None) is _replicate_for_data_parallel:
        del attributes[NAME]
