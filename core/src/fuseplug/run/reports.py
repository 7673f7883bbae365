"""The file with the reports of a run: a JSON list, with one item for each model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import SettingsError


def begin(path: Path) -> None:
    """Write the list of no reports.

    Raises:
        SettingsError: If *path* cannot be written.
    """
    try:
        path.write_text("[]\n")
    except OSError as error:
        raise SettingsError(f"--report {path} cannot be written: {error.strerror}: name another file") from error


def add(path: Path, report: dict[str, Any]) -> None:
    """Add *report* to the list. Whoever reads the file meanwhile finds it whole."""
    reports = json.loads(path.read_text()) if path.exists() else []
    half = path.with_name(f"{path.name}.{os.getpid()}")
    half.write_text(json.dumps([*reports, report], indent=2, default=str) + "\n")
    half.replace(path)
