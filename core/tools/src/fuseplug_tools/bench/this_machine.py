"""Describes the machine on which figures were taken, so that they can be read elsewhere."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from fuseplug.devices import processor

from ..machine import version_of

VERSIONS = ("fuseplug", "torch", "transformers", "pluggy", "importlib-metadata")


def machine(packages: Sequence[str] = VERSIONS) -> dict[str, Any]:
    """The machine and its software, without anything that tells where the machine stands.

    Args:
        packages: The distributions whose versions are listed.
    """
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "system": platform.system(),
        "date": datetime.date.today().isoformat(),
        "versions": {name: version_of(name) or "not installed" for name in packages},
    }
