"""Another number, or other values in a tensor, for what a twin holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..reading import Path, attribute
from ..safe_access import attributes_of, children_of

Change = Callable[[nn.Module], None]


class CannotChangeError(Exception):
    """The twin has nothing at that place that can be changed."""


def another_number(path: Path) -> Change:
    """Changes the number at *path*; raises `CannotChangeError` where there is none."""

    def change(twin: nn.Module) -> None:
        for owner in _owners(twin, path):
            value = attribute(owner, path[-1])
            if type(value) not in (int, float):
                raise CannotChangeError(path)
            other = value + 1 if type(value) is int else 0.7 * value + 0.11
            _dict_of(owner)[path[-1]] = other

    return change


def other_values(path: Path) -> Change:
    """Changes the values of the tensor at *path*; raises `CannotChangeError` where there is none that has any."""

    def change(twin: nn.Module) -> None:
        for owner in _owners(twin, path):
            value = attribute(owner, path[-1])
            if not isinstance(value, Tensor) or value.is_meta:
                raise CannotChangeError(path)
            with torch.no_grad():
                value.copy_(_other(value))

    return change


def _other(value: Tensor) -> Tensor:
    if value.dtype is torch.bool:
        return ~value
    if not value.is_floating_point():
        return value + 1
    # Eighths are the same number in every dtype, so that the truth gets what the others get.
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, 16, value.shape, generator=generator, device="cpu").div(8).to(value.device)


def _owners(twin: nn.Module, path: Path) -> Iterator[Any]:
    """Everything that has the last name of *path*: several where it leads through a list of modules."""
    found: list[Any] = [twin]
    for name in path[:-1]:
        if name == "*":
            found = [child for each in found for child in children_of(each).values() if child is not None]
        else:
            found = [attribute(each, name) for each in found]
    yield from found


def _dict_of(owner: Any) -> dict[str, Any]:
    held = attributes_of(owner) if isinstance(owner, nn.Module) else getattr(owner, "__dict__", None)
    if not isinstance(held, dict):
        raise CannotChangeError(owner)
    return held
