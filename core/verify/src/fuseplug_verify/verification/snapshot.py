"""Detects whether third-party code changed a module that it was shown."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..safe_access import all_below, attributes_of
from .copying import Uncopied


class Snapshot:
    """What some stand-ins and all below them hold, to see whether third-party code changed it, and to put it back.

    Dictionaries, lists, sets, deques and the attributes of objects are looked into; other objects are not.

    Args:
        copies: Stand-ins; what they share is looked at once.
    """

    def __init__(self, copies: Iterable[nn.Module]) -> None:
        registries = {id(registry): registry for module in all_below(*copies) for registry in _registries(module)}
        containers = _inside(registries)
        self._held = [(registry, dict(registry)) for registry in registries.values()]
        self._containers = [(container, list(container)) for container in containers]
        tensors = {
            id(value): value
            for registry in registries.values()
            if not {Tensor, nn.Parameter}.isdisjoint(map(type, registry.values()))
            for value in registry.values()
            if issubclass(type(value), Tensor)
        }
        self._tensors = [(tensor, _kind(tensor), tensor._version) for tensor in tensors.values()]

    def changed(self) -> bool:
        """Whether anything was set, removed or written into their tensors since the snapshot was taken."""
        try:
            if any(dict.__ne__(registry, held) for registry, held in self._held):
                return True
            if any(list(container) != held for container, held in self._containers):
                return True
        except Exception:  # noqa: BLE001 - comparing what was put there, a tensor say, may raise anything
            return True
        return any((_kind(tensor), tensor._version) != (kind, version) for tensor, kind, version in self._tensors)

    def restore(self) -> None:
        """Put everything back."""
        for registry, held in self._held:
            registry.clear()
            registry.update(held)
        for container, items in self._containers:
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(items)
        for tensor, (shape, dtype, gradient), _ in self._tensors:
            tensor.requires_grad_(False)
            tensor.data = torch.empty(shape, dtype=dtype, device="meta")
            tensor.requires_grad_(gradient)
        self._tensors = [(tensor, kind, tensor._version) for tensor, kind, _ in self._tensors]


def _registries(copy: nn.Module) -> tuple[dict[str, Any], ...]:
    held = attributes_of(copy)
    return tuple(
        found for found in (held, *map(held.get, ("_parameters", "_buffers", "_modules"))) if found is not None
    )


_FLAT = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_OPAQUE = (Tensor, nn.Module, Uncopied, type, types.ModuleType, types.FunctionType)


def _inside(registries: dict[int, dict[Any, Any]]) -> list[Any]:
    """The lists, sets and deques that *registries* lead to; dictionaries on the way are added to these."""
    containers: dict[int, Any] = {}
    seen: set[int] = set()
    waiting: list[Iterable[Any]] = [registry.values() for registry in registries.values()]
    while waiting:
        for value in waiting.pop():
            kind = type(value)
            if kind in _FLAT or id(value) in seen or issubclass(kind, _OPAQUE):
                continue
            seen.add(id(value))
            if issubclass(kind, (list, set, deque)):
                containers[id(value)] = value
            if issubclass(kind, dict):
                registries[id(value)] = value
                waiting.append(dict.values(value))
            elif issubclass(kind, (list, set, deque, tuple)):
                waiting.append(list(value))
            elif kind.__dictoffset__:
                waiting.append([object.__getattribute__(value, "__dict__")])
    return list(containers.values())


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, bool]:
    return (tensor.shape, tensor.dtype, tensor.requires_grad)
