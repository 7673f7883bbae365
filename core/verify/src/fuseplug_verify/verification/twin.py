"""Runnable copies of a module that share its class and code, but nothing that can change: no tensors, hooks, patches.

Fuseplug only ever runs such copies, never the live module. So it does not matter whether the live module is sharded,
offloaded, on meta, hooked or wrapped, and any thread may plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Example
from ..safe_access import attributes_of, children_of, class_name
from .copying import Copying, UncopyableError
from .memory import readable

_HOOKS = frozenset(name for name in nn.Module().__dict__ if name.endswith("_hooks") or "_hooks_" in name)
NOT_COMPUTED = _HOOKS | {
    *("forward", "_old_forward", "_hf_hook", "_compiled_call_impl", "_replicate_for_data_parallel"),
    *("_parameters", "_buffers", "_modules"),
}
"""Attributes that an instance does not compute with (patches, hooks and compiled calls), and its registries."""


def twin(module: nn.Module, example: Example, place: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """A runnable copy of *module*, with the tensors, attributes and children that *example* has for it.

    Buffers and attributes that *example* does not name keep their values. Parameters that it does not name, and the
    module's other children, have no values. An `Uncopied` stands in for anything that cannot be copied, such as an open
    file or a module that is not a child.

    Args:
        module: Any module, except one of TorchScript.
        example: What takes the place of the module's own tensors, attributes and children. It is copied, too.
        place: Copies a tensor to where the twin will run, a parameter as a parameter. The default copies to the CPU.

    Raises:
        Exception: Whatever the module raises when it is read.
    """
    place = place or _cloned

    def placed(tensor: Tensor) -> Tensor:
        return place(tensor) if readable(tensor) else valueless(tensor)

    copies: dict[int, nn.Module] = {}
    below = children_of(module)
    others = {name: _copied(child, copies, placed) for name, child in example.children.items()}
    copies |= {id(below[name]): copy for name, copy in others.items() if below.get(name) is not None}
    copy = copies[id(module)] = object.__new__(type(module))
    children = {
        name: others[name] if name in others else None if child is None else _copied(child, copies, valueless)
        for name, child in below.items()
    }
    copying = _copying(copies, placed)
    state = copied_attributes(module, copying)
    tensors = copied_tensors(module, valueless, placed)
    state |= copying.attributes(example.attributes)
    for name, value in example.parameters.items():
        if name in tensors["_parameters"]:
            value = nn.Parameter(value, value.is_floating_point() or value.is_complex())
        next((store for store in tensors.values() if name in store), state)[name] = place(value)
    # In the module's own order, on which a forward may depend.
    fill(copy, state | tensors | {"_modules": children | others})
    return copy


def _copied(module: nn.Module, copies: dict[int, nn.Module], tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of *module* and all below it, with tensors copied by *tensor*; those in *copies* are not copied again."""
    if id(module) in copies:
        return copies[id(module)]
    if issubclass(type(module), torch.jit.ScriptModule):
        return nn.Module()
    copy: nn.Module = copies.setdefault(id(module), object.__new__(type(module)))
    below = children_of(module).items()
    children = {name: None if child is None else _copied(child, copies, tensor) for name, child in below}
    state = copied_attributes(module, _copying(copies, tensor)) | copied_tensors(module, tensor, tensor)
    fill(copy, state | {"_modules": children})
    return copy


def _copying(copies: dict[int, nn.Module], tensor: Callable[[Tensor], Tensor]) -> Copying:
    def copy_of(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            raise UncopyableError(f"it leads to a {class_name(module)} that is no child of the module")
        return copies[id(module)]

    return Copying(tensor, copy_of)


def copied_attributes(module: nn.Module, copying: Copying) -> dict[str, Any]:
    """Copies of the attributes of *module*, except its parameters, buffers, children, hooks and patches."""
    state = attributes_of(module)
    kept = {name: value for name, value in state.items() if name not in NOT_COMPUTED}
    return {name: {} for name in _HOOKS if state.get(name) is not None} | copying.attributes(kept)


def fill(copy: nn.Module, state: dict[str, Any]) -> None:
    """Give *copy*, a bare object, the attributes *state*."""
    # Call neither __init__, which may do anything, nor __setattr__, which does more in torch.compile's wrapper.
    object.__setattr__(copy, "__dict__", state)


def copied_tensors(
    module: nn.Module, parameter: Callable[[Tensor], Tensor], buffer: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, Tensor | None]]:
    """The registries of *module*: parameters as *parameter* copies them, buffers as *buffer* does."""
    stored = attributes_of(module)
    return {
        "_parameters": {name: t if t is None else parameter(t) for name, t in stored["_parameters"].items()},
        "_buffers": {name: t if t is None else buffer(t) for name, t in stored["_buffers"].items()},
    }


def _cloned(tensor: Tensor) -> Tensor:
    copy = tensor.detach().cpu().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def valueless(tensor: Tensor) -> Tensor:
    """A tensor on meta with the shape and dtype of *tensor*; a parameter for a parameter."""
    try:
        # DeepSpeed's ZeRO-3 leaves an empty tensor behind, with the true shape in an attribute.
        copy = torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
    except Exception:  # noqa: BLE001 - a subclass of Tensor may raise anything
        # A nested tensor has no shape; planning leaves modules with nested tensors alone.
        copy = torch.empty(0, device="meta")
    if issubclass(type(tensor), nn.Parameter):
        return nn.Parameter(copy, copy.is_floating_point() or copy.is_complex())
    return copy
