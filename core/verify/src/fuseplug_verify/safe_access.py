"""What a module holds, read without running any code of its class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_ATTRIBUTES: Any = vars(nn.Module)["__dict__"]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The instance attributes of *module*, even if its class would answer differently."""
    attributes: dict[str, Any] = _ATTRIBUTES.__get__(module)
    return attributes


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of *module*, by name.

    Raises:
        TypeError: If it has no registry of children, or if the registry holds anything but modules.
    """
    registry = attributes_of(module).get("_modules")
    if registry is None:
        raise TypeError(f"{class_name(module)} has no registries: call super().__init__() in its __init__()")
    children = dict(registry.items())
    for name, child in children.items():
        if child is not None and not issubclass(type(child), nn.Module):
            raise TypeError(f"its child {name} is {class_name(child)}, not a torch.nn.Module")
    return children


def all_below(*modules: nn.Module) -> Iterator[nn.Module]:
    """*modules* and every module below them, each once by identity; one with an invalid registry has no children."""
    seen: set[int] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        try:
            waiting += [child for child in reversed(children_of(module).values()) if child is not None]
        except Exception:  # noqa: BLE001, S112 - a third party's registry may raise anything
            continue


def class_name(value: object) -> str:
    """The name of the class of *value*."""
    try:
        return str(type(value).__name__)
    except Exception:  # noqa: BLE001 - a metaclass may raise anything
        return "(a class without a name)"


def said_by(error: BaseException) -> str:
    """The class of *error* and the first paragraph of its message."""
    try:
        # After that paragraph, torch's dispatcher lists where each of its backends is registered.
        message = str(error).partition("\n\n")[0]
    except Exception:  # noqa: BLE001 - a third party's exception may raise anything
        message = "(its message cannot be read)"
    return f"{class_name(error)}: {message}" if message else class_name(error)
