"""Did a stranger change what it was shown?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """What some stand-ins and all below them hold, to see whether a stranger changed it, and to put it back.

    Args:
        copies: Stand-ins; what they share is looked at once.
    """

    def __init__(self, copies: Iterable[nn.Module]) -> None:
        registries = {id(registry): registry for module in _all(copies) for registry in _registries(module)}
        self._held = [(registry, dict(registry)) for registry in registries.values()]
        tensors = {
            id(value): value
            for registry in registries.values()
            if not {Tensor, nn.Parameter}.isdisjoint(map(type, registry.values()))
            for value in registry.values()
            if isinstance(value, Tensor)
        }
        self._tensors = [(tensor, _kind(tensor), tensor._version) for tensor in tensors.values()]

    def changed(self) -> bool:
        """Whether anything was set on or removed from them, or written into their tensors, since they were as now."""
        try:
            if any(registry != held for registry, held in self._held):
                return True
        except Exception:  # noqa: BLE001 - comparing what was put there, a tensor say, may raise anything
            return True
        return any((_kind(tensor), tensor._version) != (kind, version) for tensor, kind, version in self._tensors)

    def restore(self) -> None:
        """Put everything back."""
        for registry, held in self._held:
            registry.clear()
            registry.update(held)
        for tensor, (shape, dtype, gradient), _ in self._tensors:
            tensor.requires_grad_(False)
            tensor.data = torch.empty(shape, dtype=dtype, device="meta")
            tensor.requires_grad_(gradient)
        self._tensors = [(tensor, kind, tensor._version) for tensor, kind, _ in self._tensors]


def _all(copies: Iterable[nn.Module]) -> Iterable[nn.Module]:
    seen: dict[int, nn.Module] = {}
    waiting = list(copies)
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            waiting += [child for child in module._modules.values() if child is not None]
    return seen.values()


def _registries(copy: nn.Module) -> tuple[dict[str, Any], ...]:
    return (copy.__dict__, copy._parameters, copy._buffers, copy._modules)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, bool]:
    return (tensor.shape, tensor.dtype, tensor.requires_grad)
