"""The command line: what is installed, what it does to a model and gains in it, and whether this machine can run it."""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import importlib_metadata
import typer

from fuseplug_tools.bench.command import bench
from fuseplug_tools.check import check
from fuseplug_tools.new.command import new
from fuseplug_tools.run.command import run

from .discovery import KernelRecord, discover
from .errors import FuseplugError
from .kernel_manager import KernelManager
from .options import Allow, AsJson, Exclude, Include, Only, Skip, TrustRemoteCode
from .plain_text import one_line, some_lines
from .tables import console, with_whole_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import nn

    from fuseplug_tools.doctor import Row

NOTHING_INSTALLED = """No kernels are installed. To begin with:

  pip install fuseplug-rmsnorm fuseplug-swiglu fuseplug-rope fuseplug-moe fuseplug-linear-cross-entropy"""
STYLES = {"ready": "green", "ok": "green", "broken": "red", "conflict": "red", "fail": "red"}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a bug is reported best with the traceback that Python prints
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(bench)
app.command()(check)
app.command()(new)
app.command(context_settings={"allow_interspersed_args": False})(run)  # what follows the command is the command's


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Fuseplug's own errors are shown without a traceback, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # whatever their encoding lacks
    try:
        app(args=None if args is None else list(args), prog_name="fuseplug")
    except FuseplugError as error:
        typer.echo(f"fuseplug: {some_lines(error)}", err=True)
        sys.exit(2)


def _kernels(manager: KernelManager) -> Sequence[KernelRecord]:
    """The kernels of *manager*. If the user interrupts the import of a plug-in, say whose import it was."""
    try:
        return manager.kernels()
    except KeyboardInterrupt as interrupt:
        typer.echo(f"fuseplug: {some_lines(interrupt) or 'interrupted'}", err=True)
        raise typer.Exit(130) from interrupt


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
    """List the installed kernels, and why those that are not ready are not."""
    records = _kernels(KernelManager())
    if as_json:
        _print_json([record.to_dict() for record in records])
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
    if not _kernels(manager):
        typer.echo(NOTHING_INSTALLED, err=True)
    run = measure or rounding == "exact"
    with console(stderr=True).status(f"building {one_line(model)}{'' if run else ' on meta'}"):
        built = _built(model, device, random_weights=run, trust_remote_code=trust_remote_code)
    planned = manager.plan(
        built,
        device=device,
        mode=mode,  # type: ignore[arg-type]  # plan says which modes there are
        include=include or None,
        exclude=exclude or (),
        only=only or (),
        skip=skip or (),
        allow=allow or (),
        measure=measure,
        rounding=rounding,  # type: ignore[arg-type]  # as above
    )
    if explain is not None:
        typer.echo(some_lines(planned.explain(explain)))
    elif as_json:
        _print_json(planned.report.to_dict())
    else:
        console().print(planned.report)


def _built(model: str, device: str | None, *, random_weights: bool, trust_remote_code: bool) -> nn.Module:
    """The model to plan: on meta, or with weights, so that it can be run."""
    if not random_weights:
        from .from_config import build

        return build(model, trust_remote_code=trust_remote_code)
    from fuseplug_tools.bench.models import build_random

    from .devices import device_here

    where = device_here(device)
    return build_random(model, layers=None, dtype=None, device=where, trust_remote_code=trust_remote_code)


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Forget everything that is kept.")] = False,
) -> None:
    """Show where passed checks and times of kernels are kept for other processes, and how many; or forget them."""
    from .configuration import environment, named
    from .kept import VARIABLE, Kept, folder

    where = folder()
    if where is None:
        typer.echo(f"nothing is kept: {named(environment(), VARIABLE)}=off, or there is no home directory")
        return
    answers = {kind: Kept(kind, where) for kind in ("checks", "timings")}
    counts = {kind: kept.clear() if clear else len(kept) for kind, kept in answers.items()}
    typer.echo(f"{where}: {', '.join(f'{n} {kind}' for kind, n in counts.items())}{' forgotten' if clear else ''}")


@app.command()
def config(as_json: AsJson = False) -> None:
    """Show every setting that is in force, and where it is from."""
    from .configuration import SETTINGS, environment

    environ = environment()
    rows = [
        (name, environ.get(each.variable), str(environ.source(each.variable) or each.variable), each.unset)
        for name, each in SETTINGS.items()
    ]
    if as_json:
        _print_json(
            {name: {"value": value, "from": None if value is None else source} for name, value, source, _ in rows}
        )
        return
    table = _table("setting", "value", "from")
    for name, value, source, unset in rows:
        told = ("not set", unset) if value is None else (repr(value), source)
        table.add_row(*map(one_line, (name, *told)))
    _show(console(), table)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine and every installed kernel; exit with 1 if something installed cannot work."""
    from fuseplug_tools.doctor import Elsewhere, examine, look

    elsewhere = Elsewhere()
    with console(stderr=True).status("importing each kernel's module in a Python of its own"):
        # Before torch is imported, to see who imports it.
        records = _kernels(KernelManager(find=functools.partial(discover, unfit=elsewhere.unfit)))
    with console(stderr=True).status("importing torch and looking at the devices"):
        machine = look()
    rows = examine(machine, records, elsewhere)
    if as_json:
        _print_json([row._asdict() for row in rows])
    else:
        _print_rows(rows)
    if any(row.state == "fail" for row in rows):
        raise typer.Exit(1)


def _print_kernels(records: Sequence[KernelRecord], *, verbose: bool) -> None:
    out, table = console(), _table("kernel", "distribution", "op", "devices", "state")
    for record in records:
        kernel = record.kernel
        devices = ", ".join(kernel.device_types) or "any" if kernel else ""
        source = f"{record.distribution} {record.version}".strip()
        cells = (record.kernel_id, source, kernel.op if kernel else "", devices)
        table.add_row(*map(one_line, cells), _state(record.state))
    _show(out, table)
    for record in records:
        if record.reason:
            _print_reason(out, record)
        if record.effects:
            _print_effects(out, record)
        if record.traceback and verbose:
            out.print(some_lines(record.traceback), markup=False, highlight=False, soft_wrap=True)
    if not verbose and any(record.traceback for record in records):
        out.print("`fuseplug list -v` shows the tracebacks.")


def _print_rows(rows: Sequence[Row]) -> None:
    out, table = console(), _table("", "what")
    table.add_column("found", ratio=1, overflow="fold")
    for row in rows:
        remedy = [f"→ {row.remedy}"] if row.remedy else []
        table.add_row(_state(row.state), one_line(row.name), some_lines("\n".join([row.found, *remedy])))
    _show(out, table, "found")
    counts = [f"{sum(row.state == state for row in rows)} {state}" for state in ("ok", "warn", "fail")]
    out.print(", ".join(counts))


def _print_reason(out: Console, record: KernelRecord) -> None:
    _print_below(out, record, [" is ", _state(record.state)], record.reason)


def _print_effects(out: Console, record: KernelRecord) -> None:
    lasting = not all(effect.undone for effect in record.effects)
    told = [f" {'has changed' if lasting else 'tried to change'} this process"]
    _print_below(out, record, told, "\n".join(map(str, record.effects)))


def _print_below(out: Console, record: KernelRecord, told: Sequence[Any], text: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    out.print(Text.assemble((one_line(record.name.lstrip(":")), "bold"), *told))
    out.print(Padding(Text(some_lines(text)), (0, 0, 1, 2), expand=False))


def _show(out: Console, table: Table, *folded: str) -> None:
    out.print(with_whole_words(table, out.width, folded))


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _state(state: str) -> Any:
    from rich.text import Text

    return Text(state, STYLES.get(state, "yellow"))


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, default=str))
