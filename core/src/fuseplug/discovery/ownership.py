"""Whose id it is that several distributions claim."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..configuration import SETTINGS
from .records import KernelRecord

REGISTERED = "(registered)"
"""What a kernel's record names as its distribution if the kernel was registered in this process."""


def normal(distribution: str) -> str:
    """The name of *distribution* as the package index compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def in_conflict(record: KernelRecord, claimants: Sequence[str]) -> str:
    """Why *record* is not in force, given the distributions that have its id and may be used; ``""`` if it is.

    What the user registered in this process is; otherwise nobody can tell whose the id is.
    """
    if len(claimants) < 2 or record.distribution == REGISTERED:
        return ""
    if (times := claimants.count(record.distribution)) > 1:
        return f"{record.name} is declared {times} times by its own distribution, which has to be mended"
    names = sorted({f"{name}:{record.kernel_id}" for name in claimants})
    others = ",".join(f"-{name}" for name in names if name != record.name)
    return (
        f"claimed by {' and '.join(names)}; uninstall all but one, or choose this one with "
        f"{SETTINGS['kernels'].variable}={others}"
    )
