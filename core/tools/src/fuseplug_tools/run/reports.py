"""The file with the reports of a run: a JSON list, with one item for each model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fuseplug.errors import SettingsError


def begin(path: Path) -> None:
    """Write an empty list of reports.

    Raises:
        SettingsError: If *path* cannot be written.
    """
    try:
        path.write_text("[]\n")
    except OSError as error:
        raise SettingsError(f"--report {path} cannot be written: {error.strerror}: name another file") from error


def add(path: Path, report: dict[str, Any]) -> int:
    """Add *report* to the list; return its number there."""
    reports = _read(path)
    _write(path, [*reports, report])
    return len(reports)


def complete(path: Path, number: int, **more: Any) -> None:
    """Add *more* to the report with this *number*. If somebody removed that report, it stays removed."""
    reports = _read(path)
    if number < len(reports):
        reports[number] |= more
        _write(path, reports)


def _read(path: Path) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return reports


def _write(path: Path, reports: list[dict[str, Any]]) -> None:
    """Replace the file at once, so that a reader always finds a whole one."""
    half = path.with_name(f"{path.name}.{os.getpid()}")
    half.write_text(json.dumps(reports, indent=2, default=str) + "\n")
    half.replace(path)
