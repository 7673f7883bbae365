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
"""Distributions that torch's wheels for other devices require in place of the one with this name."""


def missing_requirements(distribution: importlib_metadata.Distribution | Any, extras: Iterable[str]) -> list[str]:
    """The requirements of *distribution*, including those of *extras*, that are not met, each with what was found."""
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


@functools.cache  # kernels of a distribution share requirements; `discover` clears the cache
def version_of(name: str) -> str | None:
    """The version of *name*, or of a distribution in its place; ``None`` if none is installed."""
    for other in (*_ALSO.get(normal(name), ()), name):
        with contextlib.suppress(importlib_metadata.PackageNotFoundError):
            version: str = importlib_metadata.version(other)
            return version
    return None
