"""Detects whether third-party code changed a module that it was shown."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_FLAT = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_OPAQUE = (type, types.ModuleType, types.FunctionType)


class Snapshot:
    """Records everything that some stand-ins lead to, to see whether third-party code changed it, and to restore it.

    It looks into dictionaries, lists, sets, deques, tuples and the attributes of objects, and into nothing else.

    Args:
        stand_ins: Modules on meta. Objects that they share are recorded once.
    """

    def __init__(self, stand_ins: Iterable[torch.nn.Module]) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[Tensor, tuple[Any, ...], int]] = []
        seen: set[int] = set()
        waiting: list[Iterable[Any]] = [list(stand_ins)]
        while waiting:
            for value in waiting.pop():
                kind = type(value)
                if kind in _FLAT or id(value) in seen or issubclass(kind, _OPAQUE):
                    continue
                seen.add(id(value))
                if issubclass(kind, Tensor):
                    self._tensors.append((value, _kind(value), value._version))
                elif issubclass(kind, dict):
                    self._dicts.append((value, dict(value)))
                    waiting.append(dict.values(value))
                elif issubclass(kind, (list, set, deque)):
                    items = list(value)
                    self._containers.append((value, items))
                    waiting.append(items)
                elif issubclass(kind, tuple):
                    waiting.append(value)
                elif kind.__dictoffset__:
                    waiting.append([object.__getattribute__(value, "__dict__")])

    def changed(self) -> bool:
        """Whether anything was set, removed or written into a tensor since the snapshot was taken."""
        try:
            if any(dict.__ne__(now, before) for now, before in self._dicts):
                return True
            if any(list(now) != before for now, before in self._containers):
                return True
        except Exception:  # noqa: BLE001 - comparing what was put there, such as a tensor, may raise anything
            return True
        return any((_kind(tensor), tensor._version) != (kind, version) for tensor, kind, version in self._tensors)

    def restore(self) -> None:
        """Put everything back."""
        for now, before in self._dicts:
            now.clear()
            now.update(before)
        for container, items in self._containers:
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(items)
        for tensor, (shape, dtype, gradient), _ in self._tensors:
            tensor.requires_grad_(False)
            tensor.data = torch.empty(shape, dtype=dtype, device="meta")
            tensor.requires_grad_(gradient)
        self._tensors = [(tensor, kind, tensor._version) for tensor, kind, _ in self._tensors]


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, bool]:
    return (tensor.shape, tensor.dtype, tensor.requires_grad)
