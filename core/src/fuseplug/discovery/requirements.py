"""What a distribution requires and this environment lacks, read from metadata before anything is imported."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement

from .ownership import normal

_ALSO = {"triton": ("triton-rocm", "pytorch-triton-rocm", "triton-xpu", "pytorch-triton-xpu", "pytorch-triton")}
"""Names under which torch's wheels for other devices bring what has this name on the package index."""


def missing_requirements(distribution: importlib_metadata.Distribution | Any, extras: Iterable[str]) -> list[str]:
    """The requirements of *distribution*, those of *extras* included, that are not met; each with what was found."""
    wanted = ("", *extras)
    lacking = []
    for line in distribution.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            lacking.append(f"{line} (not a valid requirement: {error})")
            continue
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in wanted):
            continue
        version = version_of(requirement.name)
        if version is None:
            lacking.append(f"{requirement.name}{requirement.specifier} (not installed)")
        elif not requirement.specifier.contains(version, prereleases=True):
            lacking.append(f"{requirement.name}{requirement.specifier} (installed: {version})")
    return lacking


@functools.cache  # several kernels of a distribution ask the same; `discover` asks anew
def version_of(name: str) -> str | None:
    """The version of *name*, or of what brings it; ``None`` if neither is installed."""
    for other in (*_ALSO.get(normal(name), ()), name):
        with contextlib.suppress(importlib_metadata.PackageNotFoundError):
            version: str = importlib_metadata.version(other)
            return version
    return None
