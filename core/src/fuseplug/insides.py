"""What a module holds, read without running any code of its class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import nn


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of *module* itself, whatever its ``__getattribute__`` would say."""
    return cast("dict[str, Any]", object.__getattribute__(module, "__dict__"))


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of *module*, by name.

    Raises:
        TypeError: If it has no registry of children, or one that holds something else.
    """
    from torch import nn

    registry = attributes_of(module).get("_modules")
    if registry is None:
        raise TypeError(f"{class_name(module)} has no children and no parameters: call super().__init__() in its class")
    found = dict(registry.items())
    for name, child in found.items():
        if child is not None and not issubclass(type(child), nn.Module):
            raise TypeError(f"its child {name} is a {class_name(child)}, expected a torch.nn.Module: register one")
    return found


def all_below(*modules: nn.Module) -> Iterator[nn.Module]:
    """*modules* and every module below them, each once, by identity; what holds no children properly has none."""
    seen: set[int] = set()
    waiting = list(modules)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        try:
            waiting += [child for child in reversed(children_of(each).values()) if child is not None]
        except Exception:  # noqa: BLE001, S112 - a stranger's registry may raise anything
            continue


def class_name(value: object) -> str:
    """The name of the class of *value*."""
    try:
        return str(type(value).__name__)
    except Exception:  # noqa: BLE001 - a metaclass may raise anything
        return "(a class without a name)"


def said_by(error: BaseException) -> str:
    """The class of *error* and its message, in a line."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a stranger's exception may raise anything
        message = "(its message cannot be read)"
    return f"{class_name(error)}: {message}" if message else class_name(error)
