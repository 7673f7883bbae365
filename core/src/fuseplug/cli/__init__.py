"""The command line: what is installed, and what it does to a model. `commands` adds other distributions' commands."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import importlib_metadata
import typer

from ..discovery.records import KernelRecord
from ..errors import FuseplugError
from ..kernel_manager import KernelManager
from ..report.plain_text import one_line, some_lines
from ..report.tables import console, empty_table, print_json, print_table, state_text
from .commands import Commands, kernels_of, notes_on
from .options import Allow, AsJson, Exclude, Include, Only, Skip, TrustRemoteCode

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn


NOTHING_INSTALLED = """No kernels are installed. To begin with:

  pip install fuseplug-rmsnorm fuseplug-swiglu fuseplug-rope fuseplug-moe fuseplug-linear-cross-entropy"""
app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a bug is reported best with the traceback that Python prints
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Fuseplug's own errors are shown without a traceback, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that their encoding lacks
    try:
        app(args=None if args is None else list(args), prog_name="fuseplug")
    except FuseplugError as error:
        typer.echo(f"fuseplug: {some_lines(error)}", err=True)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fuseplug {importlib_metadata.version('fuseplug')}")
        raise typer.Exit


@app.callback()
def _fuseplug(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fused kernels for PyTorch models as plug-ins: found, verified, applied and taken off again."""


@app.command("list")
def list_kernels(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the tracebacks of broken kernels.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the installed kernels, and say why a kernel is not ready."""
    records = kernels_of(KernelManager())
    if as_json:
        print_json([record.to_dict() for record in records])
    elif records:
        _print_kernels(records, verbose=verbose)
    else:
        typer.echo(NOTHING_INSTALLED)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A config.json, a model's directory, or a Hub id. Weights are never read."
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(help="Where the model will run: npu, cuda, cpu, … The default is the accelerator here, or cpu."),
    ] = None,
    mode: Annotated[str, typer.Option(help="training, inference, or auto, which is training.")] = "auto",
    include: Include = None,
    exclude: Exclude = None,
    only: Only = None,
    skip: Skip = None,
    allow: Allow = None,
    trust_remote_code: TrustRemoteCode = False,
    explain: Annotated[
        str | None, typer.Option(metavar="PATH", help="Say what every kernel answers about the module at this path.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Build the model with random weights, and measure from which size on each kernel gains in it here.",
        ),
    ] = False,
    rounding: Annotated[
        str,
        typer.Option(
            help="close, or exact: build the model with random weights, and use only kernels that are the originals "
            "bit for bit here.",
        ),
    ] = "close",
    as_json: AsJson = False,
) -> None:
    """Show what would be fused in a model, what would not, and why."""
    manager = KernelManager()
    kernels_of(manager)  # before anything is built, because the user may interrupt it
    run = measure or rounding == "exact"
    with console(stderr=True).status(f"building {one_line(model)}{'' if run else ' on meta'}"):
        built = _built(model, device, random_weights=run, trust_remote_code=trust_remote_code)
    planned = manager.plan(
        built,
        device=device,
        mode=mode,  # type: ignore[arg-type]  # plan refuses unknown modes
        include=include or None,
        exclude=exclude or (),
        only=only or (),
        skip=skip or (),
        allow=allow or (),
        measure=measure,
        rounding=rounding,  # type: ignore[arg-type]  # as above
    )
    report = dataclasses.replace(planned.report, notes=[*planned.report.notes, *notes_on(built, planned.report)])
    if explain is not None:
        typer.echo(some_lines(planned.explain(explain)))
    elif as_json:
        print_json(report.to_dict())
    else:
        console().print(report)


def _built(model: str, device: str | None, *, random_weights: bool, trust_remote_code: bool) -> nn.Module:
    """The model to plan: on meta, or with random weights, so that it can be run."""
    from .from_config import build, config_of, with_random_weights

    if not random_weights:
        return build(model, trust_remote_code=trust_remote_code)
    from ..devices import device_here

    config = config_of(model, trust_remote_code=trust_remote_code)
    return with_random_weights(config, model, device=device_here(device), trust_remote_code=trust_remote_code)


def _print_kernels(records: Sequence[KernelRecord], *, verbose: bool) -> None:
    out, table = console(), empty_table("kernel", "distribution", "op", "devices", "state")
    for record in records:
        kernel = record.kernel
        devices = ", ".join(kernel.device_types) or "any" if kernel else ""
        source = f"{record.distribution} {record.version}".strip()
        cells = (record.kernel_id, source, kernel.op if kernel else "", devices)
        table.add_row(*map(one_line, cells), state_text(record.state))
    print_table(out, table)
    for record in records:
        if record.state in ("not installed", "off", "not allowed"):  # the user's own choice: a line is enough
            out.print(f"{one_line(record.name)} is {record.state}: {one_line(record.reason)}")
        elif record.reason:
            _print_below(out, record, [" is ", state_text(record.condition)], record.reason)
        if record.import_costs:
            _print_below(out, record, [" is slow to import"], "\n".join(record.import_costs))
        if record.traceback and verbose:
            out.print(some_lines(record.traceback), markup=False, highlight=False, soft_wrap=True)
    if not verbose and any(record.traceback for record in records):
        out.print("`fuseplug list -v` shows the tracebacks.")


def _print_below(out: Console, record: KernelRecord, told: Sequence[Any], text: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    out.print(Text.assemble((one_line(record.name.lstrip(":")), "bold"), *told))
    out.print(Padding(Text(some_lines(text)), (0, 0, 1, 2), expand=False))
