"""Copies of a module that share its class and attributes but none of its tensors, hooks or patches.

Everything Fuseplug wants to know of a module it asks of such a copy, so that the live one is never touched: whether it
is sharded, offloaded, on meta, hooked or wrapped makes no difference, and any thread may ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

HOOKS = frozenset(name for name in nn.Module().__dict__ if name.endswith("_hooks") or "_hooks_" in name)
INSTANCE_ONLY = frozenset({"forward", "_old_forward", "_hf_hook", "_compiled_call_impl"})


def stand_in(module: nn.Module, made: dict[int, nn.Module] | None = None) -> nn.Module:
    """A copy of *module*, and of all below it, whose tensors have a shape and a dtype but no values.

    Args:
        module: Any module. For TorchScript, which cannot be copied so, an empty module stands in.
        made: Stand-ins made already, by ``id`` of the module; shared modules share one.
    """
    made = {} if made is None else made
    if id(module) not in made:
        made[id(module)] = copy = nn.Module() if isinstance(module, torch.jit.ScriptModule) else _copy(module)
        copy.__dict__["_modules"] = _stand_ins(module, made)
    return made[id(module)]


def twin(module: nn.Module, tensors: Mapping[str, Tensor], children: Mapping[str, nn.Module]) -> nn.Module:
    """A runnable copy of *module* on the CPU, with *tensors* for its own tensors and *children* for its children.

    Buffers that *tensors* does not name keep their values; parameters that it does not name have none.
    """
    copy = _copy(module)
    # Straight into __dict__: some classes (torch.compile's wrapper) do more than set in __setattr__.
    copy.__dict__["_modules"] = _stand_ins(module, {}) | {name: deepcopy(child) for name, child in children.items()}
    for name, value in own_tensors(module).items():
        if name not in module._parameters and not value.is_meta:
            registry = copy._buffers if name in copy._buffers else copy.__dict__
            registry[name] = value.detach().cpu().clone()
    for name, value in tensors.items():
        if name in copy._parameters:
            copy._parameters[name] = nn.Parameter(value)
        elif name in copy._buffers:
            copy._buffers[name] = value
        else:
            copy.__dict__[name] = value
    return copy


def fingerprint(copy: nn.Module) -> tuple[object, ...]:
    """What changes if anything is set on or removed from a stand-in, or written into its tensors."""
    registries = (copy.__dict__, copy._parameters, copy._buffers, copy._modules)
    tensors = (*copy._parameters.values(), *copy._buffers.values())
    return (
        *(tuple((name, id(value)) for name, value in registry.items()) for registry in registries),
        tuple(tensor._version for tensor in tensors if tensor is not None),
    )


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and plain tensor attributes (where FSDP keeps its views) of *module* itself, by name."""
    attributes = {name: value for name, value in module.__dict__.items() if isinstance(value, Tensor)}
    registered = {**module._parameters, **module._buffers}
    return {**{name: value for name, value in registered.items() if value is not None}, **attributes}


def _stand_ins(module: nn.Module, made: dict[int, nn.Module]) -> dict[str, nn.Module | None]:
    children = {} if isinstance(module, torch.jit.ScriptModule) else module._modules
    return {name: None if child is None else stand_in(child, made) for name, child in children.items()}


def _copy(module: nn.Module) -> nn.Module:
    copy: nn.Module = object.__new__(type(module))
    attributes = copy.__dict__
    for name, value in module.__dict__.items():
        if name in HOOKS:
            attributes[name] = {} if value is not None else None
        elif name not in INSTANCE_ONLY:
            attributes[name] = _valueless(value) if isinstance(value, Tensor) else value
    attributes["_parameters"] = {
        name: parameter
        if parameter is None
        else nn.Parameter(_valueless(parameter), requires_grad=_floating(parameter))
        for name, parameter in module._parameters.items()
    }
    attributes["_buffers"] = {name: b if b is None else _valueless(b) for name, b in module._buffers.items()}
    return copy


def _valueless(tensor: Tensor) -> Tensor:
    # DeepSpeed's ZeRO-3 leaves an empty tensor behind, with the true shape beside it.
    return torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
