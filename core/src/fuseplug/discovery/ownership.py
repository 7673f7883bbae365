"""Decides which of several distributions has the id that all of them claim."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..configuration import SETTINGS
from .records import KernelRecord

REGISTERED = "(registered)"
"""The distribution in the record of a kernel that was registered in this process."""


def owner(kernel_id: str, distributions: Sequence[str]) -> str | None:
    """The one of *distributions*, all of which claim *kernel_id*, that has it; ``None`` if none of them does.

    A kernel that the user registered in this process comes first, then the distribution with whose name the id begins.
    Of several such names, the longest one counts.
    """
    if REGISTERED in distributions:
        return REGISTERED
    by_name = {normal(name): name for name in distributions}
    named = [name for name in by_name if _begins_with(kernel_id, name)]
    return by_name[max(named, key=len)] if named else None


def normal(distribution: str) -> str:
    """The name of *distribution* in the form in which the package index compares names."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _begins_with(kernel_id: str, distribution: str) -> bool:
    return f"{normal(kernel_id)}-".startswith(f"{distribution}-")


def in_conflict(record: KernelRecord, claimants: Sequence[str]) -> str:
    """Why *record* does not have its id, given all distributions that claim it and may be used; ``""`` if it does."""
    holder = owner(record.kernel_id, claimants)
    if claimants.count(holder or "") > 1:
        holder = None
    if len(claimants) < 2 or holder == record.distribution:
        return ""
    if (times := claimants.count(record.distribution)) > 1:
        return f"{record.name} is declared {times} times by its own distribution: correct its entry points"
    names = sorted({f"{name}:{record.kernel_id}" for name in claimants})
    others = ",".join(f"-{name}" for name in names if name != record.name)
    choose = f"choose this one with {SETTINGS['kernels'].variable}={others}"
    if holder is None:
        return f"claimed by {' and '.join(names)}; uninstall all but one, or {choose}"
    return f"the id is that of {holder}, which stays in force; uninstall {record.distribution}, or {choose}"
