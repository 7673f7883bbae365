"""Changes a number, or the values of a tensor, that a twin holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..reading.findings import Path
from ..reading.lookup import attribute
from ..safe_access import attributes_of, children_of

Change = Callable[[nn.Module], None]


def another_value(path: Path) -> Change:
    """A function that changes the number or tensor at *path*, or raises `LookupError` if there is neither."""

    def change(twin: nn.Module) -> None:
        owners: list[Any] = [twin]
        for name in path[:-1]:
            if name == "*":
                owners = [child for owner in owners for child in children_of(owner).values() if child is not None]
            else:
                owners = [attribute(owner, name) for owner in owners]
        for owner in owners:
            attributes = attributes_of(owner) if isinstance(owner, nn.Module) else getattr(owner, "__dict__", None)
            value = attribute(owner, path[-1])
            if isinstance(value, Tensor) and not value.is_meta:
                with torch.no_grad():
                    value.copy_(_other(value))
            elif type(value) in (int, float) and isinstance(attributes, dict):
                attributes[path[-1]] = value + 1 if type(value) is int else 0.7 * value + 0.11
            else:
                raise LookupError(path)

    return change


def _other(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return ~value if value.dtype is torch.bool else value + 1
    # Eighths are exact in every dtype, so the truth gets the same numbers as the others.
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, 16, value.shape, generator=generator, device="cpu").div(8).to(value.device)
