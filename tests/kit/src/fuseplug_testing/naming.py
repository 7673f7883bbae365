"""Finds the kernel that a user means."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from fuseplug.discovery.records import KernelRecord
from fuseplug.discovery.selecting import KERNELS_VARIABLE
from fuseplug.errors import DiscoveryError
from fuseplug.hookspecs import ENTRY_POINT_GROUP, resolve
from fuseplug.kernel_manager import KernelManager


@dataclass(frozen=True)
class Named:
    """A kernel, and the distribution that it comes from.

    Attributes:
        kernel: The kernel's class, or an instance.
        distribution: The distribution; ``None`` if the kernel is not installed as one.
        version: The version of the distribution.
    """

    kernel: Any
    distribution: str | None = None
    version: str | None = None


def named(name: str) -> Named:
    """The kernel that *name* stands for.

    Args:
        name: The id of an installed kernel, ``distribution:id`` if two have the id, or ``package.module:Class``.

    Raises:
        DiscoveryError: If there is no such kernel, or it cannot be used.
    """
    records = KernelManager().kernels()
    if ":" in name:
        if not any(record.name == name for record in records):
            return _imported(name)
        # A kernel that is chosen by this name has its id to itself.
        records = KernelManager({**os.environ, KERNELS_VARIABLE: name}).kernels()
    record = next((record for record in records if name in (record.kernel_id, record.name)), None)
    if record is None:
        installed = sorted({record.kernel_id for record in records})
        near = difflib.get_close_matches(name, installed, n=3)
        others = f"nearest installed: {', '.join(near)}" if near else f"these are: {', '.join(installed) or 'none'}"
        raise DiscoveryError(f"{name} is not installed; {others}")
    if record.kernel is None:
        raise DiscoveryError(f"{name} is {record.condition}: {record.reason}", record=record)
    return _of(record)


def all_ready() -> list[Named]:
    """Every installed kernel that can be used."""
    return [_of(record) for record in KernelManager().kernels() if record.state == "ready"]


def _of(record: KernelRecord) -> Named:
    return Named(record.kernel, record.distribution, record.version or None)


def _imported(name: str) -> Named:
    try:
        kernel = resolve(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a third party's import may raise anything, or exit
        raise DiscoveryError(f"{name} is no installed kernel, and cannot be imported: {error}") from error
    for entry in importlib_metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.value.partition("[")[0].strip() == name and entry.dist is not None:
            return Named(kernel, entry.dist.name, entry.dist.version)
    return Named(kernel)
