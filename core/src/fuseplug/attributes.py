"""Looks at the attributes of a module without running its code."""

from __future__ import annotations

from typing import Any


def attributes_of(module: object) -> dict[str, Any]:
    """The attributes of *module* itself, whatever its class would say of them."""
    return object.__getattribute__(module, "__dict__")  # type: ignore[no-any-return]
