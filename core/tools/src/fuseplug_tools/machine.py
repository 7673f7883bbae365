"""The input and the results of the checks of ``fuseplug doctor``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import importlib_metadata

from fuseplug.configuration import environment

State = Literal["ok", "warn", "fail"]


class Diagnosis(NamedTuple):
    """The result of one check.

    Attributes:
        name: What was checked.
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
    """The state of the machine, as the checks see it.

    Attributes:
        environ: The environment variables, with the settings of Fuseplug from the user's file.
        torch: The module; ``None`` if importing it or listing the devices failed.
        torch_error: The error in that case.
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
        SettingsError: If *environ* is not given and the user's file is invalid.
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
    """The installed version of *distribution*; ``None`` if it is not installed."""
    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def first_cause(error: BaseException) -> str:
    """The type and message of the first cause of *error*, which names the missing library."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip()}"
