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
"""What an instance holds and does not compute with, patches, hooks and compiled calls; and its registries."""


def twin(module: nn.Module, example: Example, place: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """A runnable copy of *module*, with what *example* has for its tensors, attributes and children.

    Buffers and attributes that it does not name keep their values; parameters that it does not name, and its other
    children, have none. What cannot be copied, an open file or a module that is no child, is an `Uncopied` there.

    Args:
        module: Any module but TorchScript.
        example: What takes the place of its own; copied too.
        place: Copies a tensor to where the twin shall run, parameters as parameters; ``None``: to the CPU.

    Raises:
        Exception: Whatever the module raises when it is looked at.
    """
    place = place or _cloned

    def placed(tensor: Tensor) -> Tensor:
        return place(tensor) if readable(tensor) else valueless(tensor)

    made: dict[int, nn.Module] = {}
    own = children_of(module)
    given = {name: _copied(child, made, placed) for name, child in example.children.items()}
    made |= {id(own[name]): copy for name, copy in given.items() if own.get(name) is not None}
    copy = made[id(module)] = object.__new__(type(module))
    children = {
        name: given[name] if name in given else None if child is None else _copied(child, made, valueless)
        for name, child in own.items()
    }
    copying = _copying(made, placed)
    held = copied_attributes(module, copying)
    tensors = copied_tensors(module, valueless, placed)
    held |= copying.attributes(example.attributes)
    for name, value in example.parameters.items():
        if name in tensors["_parameters"]:
            value = nn.Parameter(value, value.is_floating_point() or value.is_complex())
        next((store for store in tensors.values() if name in store), held)[name] = place(value)
    # In the module's own order, which a forward may go by.
    fill(copy, held | tensors | {"_modules": children | given})
    return copy


def _copied(module: nn.Module, made: dict[int, nn.Module], tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of *module* and all below it, tensors as *tensor* makes them; what *made* has is not copied again."""
    if id(module) in made:
        return made[id(module)]
    if issubclass(type(module), torch.jit.ScriptModule):
        return nn.Module()
    copy: nn.Module = made.setdefault(id(module), object.__new__(type(module)))
    below = children_of(module).items()
    children = {name: None if child is None else _copied(child, made, tensor) for name, child in below}
    held = copied_attributes(module, _copying(made, tensor)) | copied_tensors(module, tensor, tensor)
    fill(copy, held | {"_modules": children})
    return copy


def _copying(made: dict[int, nn.Module], tensor: Callable[[Tensor], Tensor]) -> Copying:
    def known(module: nn.Module) -> nn.Module:
        if id(module) not in made:
            raise UncopyableError(f"it leads to a {class_name(module)} that is no child of the module")
        return made[id(module)]

    return Copying(tensor, known)


def copied_attributes(module: nn.Module, copying: Copying) -> dict[str, Any]:
    """What *module* holds, without its tensors, children, hooks and patches."""
    held = attributes_of(module)
    kept = {name: value for name, value in held.items() if name not in NOT_COMPUTED}
    return {name: {} for name in _HOOKS if held.get(name) is not None} | copying.attributes(kept)


def fill(copy: nn.Module, attributes: dict[str, Any]) -> None:
    """Give *copy*, a bare object, its *attributes*."""
    # Neither __init__, which may do anything, nor __setattr__, which does more than set in torch.compile's wrapper.
    object.__setattr__(copy, "__dict__", attributes)


def copied_tensors(
    module: nn.Module, parameter: Callable[[Tensor], Tensor], buffer: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, Tensor | None]]:
    """The registries of *module*: parameters as *parameter* copies them, buffers as *buffer* does."""
    copies = {"_parameters": parameter, "_buffers": buffer}
    return {
        registry: {
            name: None if tensor is None else copy(tensor) for name, tensor in attributes_of(module)[registry].items()
        }
        for registry, copy in copies.items()
    }


def _cloned(tensor: Tensor) -> Tensor:
    copy = tensor.detach().cpu().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def valueless(tensor: Tensor) -> Tensor:
    """A tensor on meta of the shape and dtype of *tensor*; a parameter for a parameter."""
    try:
        # DeepSpeed's ZeRO-3 leaves an empty tensor behind, with the true shape beside it.
        copy = torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
    except Exception:  # noqa: BLE001 - a subclass of Tensor may raise anything
        # A nested tensor has no shape; planning leaves alone what has one.
        copy = torch.empty(0, device="meta")
    if issubclass(type(tensor), nn.Parameter):
        return nn.Parameter(copy, copy.is_floating_point() or copy.is_complex())
    return copy
