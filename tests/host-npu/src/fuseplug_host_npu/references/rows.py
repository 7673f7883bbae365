"""The references that come with this distribution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .registry import table


@functools.cache
def references() -> dict[str, Callable[..., Any]]:
    """The table of references itself, by the ops' qualified names, with the rows of this distribution."""
    from . import activations, attention, casts, grouped_matmul, moe, norms, rotary, torch_ops  # noqa: F401

    return table
