"""Commands of other distributions, found by the entry-point group ``fuseplug.commands``.

The name of an entry point is that of the command. The entry point names a function for typer, or a `typer.Typer` made
with ``add_completion=False``. ``fuseplug NAME`` imports the module of one command. ``fuseplug --help`` imports the
modules of all commands, to show the first sentence of each, so a module should import torch only in its functions.
``fuseplug list`` imports none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import importlib_metadata
import typer
from typer.core import TyperGroup

from ..errors import FuseplugError
from ..report.plain_text import some_lines

if TYPE_CHECKING:
    from torch import nn

    from ..discovery.records import KernelRecord
    from ..kernel_manager import KernelManager
    from ..report import Report

GROUP = "fuseplug.commands"
TOOLS = "fuseplug-tools"


def kernels_of(manager: KernelManager) -> Sequence[KernelRecord]:
    """The kernels of *manager*. If the user interrupts the import of a plug-in, say whose import it was."""
    try:
        return manager.kernels()
    except KeyboardInterrupt as interrupt:
        typer.echo(f"fuseplug: {some_lines(interrupt) or 'interrupted'}", err=True)
        raise typer.Exit(130) from interrupt


def notes_on(model: nn.Module, report: Report) -> Iterator[str]:
    """The notes of installed distributions on a plan; for a broken distribution, a note that says so."""
    for entry in importlib_metadata.entry_points(group="fuseplug.notes"):
        try:
            yield from entry.load()(model, report)
        except Exception as error:  # noqa: BLE001 - a third party's code may raise anything
            yield f"{_named(entry)} is broken: {type(error).__name__}: {error}"


class Commands(TyperGroup):
    """The commands of core, and those of all other installed distributions."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands: first core's, then the others in alphabetical order."""
        of_core = super().list_commands(ctx)
        return [*of_core, *sorted({entry.name for entry in importlib_metadata.entry_points(group=GROUP)} - {*of_core})]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; ``None`` if there is none.

        Raises:
            FuseplugError: If there is no such command, and no installed distribution adds commands.
        """
        return super().get_command(ctx, cmd_name) or _installed(cmd_name)


def _installed(name: str) -> Any:
    entries = [*importlib_metadata.entry_points(group=GROUP, name=name)]
    if not entries:
        if not importlib_metadata.entry_points(group=GROUP):
            raise FuseplugError(
                f"there is no command {name!r} here; bench, check, doctor, run and others come with {TOOLS}, which is "
                f"not installed: pip install {TOOLS}"
            )
        return None
    if len(entries) > 1:
        owners = " and ".join(sorted(map(_named, entries)))
        return _broken(name, f"{owners} have a command of this name: uninstall all but one")
    try:
        return _command(name, entries[0].load())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a third party's import may raise anything, or exit
        return _broken(name, f"{_named(entries[0])} is broken: {type(error).__name__}: {error}")


def _command(name: str, target: Any) -> Any:
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(add_completion=False)
        target.command(name)(function)
    command = typer.main.get_command(target)
    command.name = name  # the target's own name may differ
    return command


def _broken(name: str, reason: str) -> Any:
    """A command that says what is wrong with it, in the list of commands and when it is called."""

    def fail() -> None:
        raise FuseplugError(f"`fuseplug {name}`: {reason}")

    broken = typer.Typer(add_completion=False)
    broken.command(name, help=reason, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(fail)
    return typer.main.get_command(broken)


def _named(entry: importlib_metadata.EntryPoint) -> str:
    return f"{entry.dist.name if entry.dist else '(unknown)'} ({entry.value})"
