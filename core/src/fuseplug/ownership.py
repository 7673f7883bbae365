"""Whose id it is that several distributions claim."""

from __future__ import annotations

import re
from collections.abc import Sequence

REGISTERED = "(registered)"
"""What a kernel's record names as its distribution if the kernel was registered in this process."""


def owner(kernel_id: str, distributions: Sequence[str]) -> str | None:
    """Which of *distributions*, all of which claim *kernel_id*, has it; ``None`` if that cannot be told.

    What the user registered in this process comes first, then the distribution with whose name the id begins. Of
    several such names, the longest.
    """
    if REGISTERED in distributions:
        return REGISTERED
    by_name = {normal(name): name for name in distributions}
    named = [name for name in by_name if _begins_with(kernel_id, name)]
    return by_name[max(named, key=len)] if named else None


def normal(distribution: str) -> str:
    """The name of *distribution* as the package index compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _begins_with(kernel_id: str, distribution: str) -> bool:
    return f"{normal(kernel_id)}-".startswith(f"{distribution.removeprefix('fuseplug-')}-")
