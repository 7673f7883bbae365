"""``fuseplug run``. Importing this module imports no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fuseplug.cli.options import Allow, Exclude, Include, Only, Skip
from fuseplug.errors import SettingsError

from .options import MODULES, MODULES_VARIABLE, VARIABLE, RunOptions
from .reports import begin

INJECTED = Path(__file__).parents[1] / "fusing" / "injected"
NOT_FOUND = 127
"""The exit status that shells give for a command that they do not find."""


class Mode(StrEnum):
    """The values of ``--mode``."""

    training = "training"
    inference = "inference"


app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_interspersed_args": False})  # options after the command belong to the command
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="python train.py, torchrun …, and so on.")],
    mode: Annotated[
        Mode, typer.Option(help="Fuse the models that are trained, or those that are called without gradients.")
    ] = Mode.training,
    include: Include = None,
    exclude: Exclude = None,
    only: Only = None,
    skip: Skip = None,
    allow: Allow = None,
    report: Annotated[Path | None, typer.Option(help="Write what was fused, and why not, into this JSON file.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End the run where a model cannot be fused as planned.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be fused, and change nothing.")] = False,
) -> None:
    """Run a command, and fuse the models that it trains, or serves, in all of its processes."""
    if report is not None:
        begin(report)
    options = RunOptions(
        mode=mode.value,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        only=tuple(only or ()),
        skip=tuple(skip or ()),
        allow=tuple(allow or ()),
        report=None if report is None else str(report.absolute()),
        strict=strict,
        dry_run=dry_run,
    )
    environ = injected(os.environ, options)
    program = shutil.which(command[0])
    if program is None:
        typer.echo(f"fuseplug run: {command[0]}: there is no such command", err=True)
        raise typer.Exit(NOT_FOUND)
    _become(program, command, environ)


def injected(environ: Mapping[str, str], options: RunOptions) -> dict[str, str]:
    """*environ*, with variables that make every Python process fuse its models.

    Raises:
        SettingsError: If ``PYTHONPATH`` cannot hold the path of Fuseplug.
    """
    here = str(INJECTED)
    if os.pathsep in here:
        raise SettingsError(f"PYTHONPATH cannot hold {here}, which has a {os.pathsep!r}: install Fuseplug elsewhere")
    before = environ.get("PYTHONPATH")
    others = [path for path in before.split(os.pathsep) if path != here] if before else []
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join([here, *others]),
        VARIABLE: options.to_environment(),
        MODULES_VARIABLE: " ".join(MODULES),
    }


def _become(program: str, command: list[str], environ: Mapping[str, str]) -> None:
    """Become the command, so that signals and the exit status are those of the command."""
    if os.name == "posix":
        os.execve(program, command, environ)  # noqa: S606 - it is the user's command
    raise typer.Exit(subprocess.run([program, *command[1:]], env=environ, check=False).returncode)  # noqa: S603
