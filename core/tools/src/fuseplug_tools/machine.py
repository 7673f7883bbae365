"""What the checks of ``fuseplug doctor`` look at, and what each of them finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import importlib_metadata

from fuseplug.configuration import environment

State = Literal["ok", "warn", "fail"]


class Diagnosis(NamedTuple):
    """What one check found.

    Attributes:
        name: What was looked at.
        state: ``"fail"`` means that something installed cannot work.
        found: What is there.
        remedy: What to do about it; ``""`` if there is nothing to do.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class MachineState:
    """What the checks look at.

    Attributes:
        environ: The environment variables, and what the user's file says of those of Fuseplug.
        torch: The module, if it could be imported.
        torch_error: What it raised if it could not.
        devices: The device types that are present.
        npus: How many Ascend NPUs the kernel driver shows, whether torch knows them or not.
    """

    environ: Mapping[str, str]
    torch: Any = None
    torch_error: BaseException | None = None
    devices: Sequence[str] = ()
    npus: int = 0


def look(environ: Mapping[str, str] | None = None) -> MachineState:
    """Import torch and list the devices. If that fails, the error is kept for the checks to explain.

    Raises:
        SettingsError: If *environ* is not given, and the user's file is not right.
    """
    environ = environment() if environ is None else environ
    npus = len(list(Path("/dev").glob("davinci[0-9]*")))
    try:
        import torch

        from fuseplug.devices import KNOWN, present

        return MachineState(environ, torch=torch, devices=sorted(kind for kind in KNOWN if present(kind)), npus=npus)
    except Exception as error:  # noqa: BLE001 - torch runs the vendors' code on import, and drivers fail in many ways
        return MachineState(environ, torch_error=error, npus=npus)


def version_of(distribution: str) -> str | None:
    """The version of *distribution* that is installed."""
    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def first_cause(error: BaseException) -> str:
    """The first cause, which is what names the missing library."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip()}"
