"""A run of the kit on a terminal: its progress, a table of its checks, the faults, the verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fuseplug.report.plain_text import one_line, some_lines

if TYPE_CHECKING:
    from rich.console import Console

    from .kit import PlannedCheck
    from .record import Record, Row

_REASONS = 3
"""How many reasons are shown for a check; ``--json`` has all."""

_STYLES = {"passed": "green", "failed": "red", "partial": "yellow", "unchecked": "yellow"}


def show(record: Record, console: Console) -> None:
    """Print *record* on *console*."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(_table(record))
    for fault in record.faults:
        where = one_line(fault.where)
        console.print(Text.assemble(("fault ", "red"), (fault.check, "bold"), f": {where}" if where else ""))
        console.print(Padding(Text(some_lines(fault.what)), (0, 0, 1, 4)))
    console.print(_verdict(record))


def summary(records: Sequence[Record], console: Console) -> None:
    """Print the verdicts of several *records*, in the order of the kernels."""
    console.print()
    for record in records:
        console.print(_verdict(record))


@contextlib.contextmanager
def progress(record: Record, console: Console) -> Iterator[Callable[[int, PlannedCheck], None]]:
    """Yield the function that `Record.run` tells which step is next; on a terminal, *console* shows the step."""
    if not console.is_terminal:
        yield lambda *_: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    where = TextColumn("{task.fields[where]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), where)
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("", total=len(record.steps), where="")

        def told(number: int, step: PlannedCheck) -> None:
            bar.update(task, completed=number, where=one_line(f"{step.check.name} {step.subject}"))

        yield told


def _table(record: Record) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    for name in ("passed", "failed", "skipped"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("skipped because", ratio=1, overflow="fold")
    absent = record.examined.absent
    alike = [row for row in record.rows.values() if row.skipped and set(row.reasons) == {absent}]
    for row in record.rows.values():
        if len(alike) < 2 or row not in alike:
            counts = [_number(each) for each in (row.passed, row.failed, row.skipped)]
            table.add_row(row.check, *counts, _reasons(row), style="red" if row.failed else "")
    if len(alike) > 1:
        table.add_row("all others", "", "", _number(sum(row.skipped for row in alike)), one_line(absent))
    return table


def _number(count: int) -> str:
    return str(count) if count else ""


def _reasons(row: Row) -> str:
    said = [f"{number} × {one_line(why)}" for why, number in row.reasons.most_common(_REASONS)]
    more = len(row.reasons) - len(said)
    return "\n".join([*said, f"{more} more reasons: see --json"] if more else said)


def _verdict(record: Record) -> Any:
    from rich.text import Text

    examined, verdict = record.examined, record.verdict
    place = "" if examined.device is None else f" on {examined.device}"
    said = {
        "passed": "",
        "failed": f", {len(record.faults)} fault{'s' * (len(record.faults) != 1)}",
        "partial": f", of which only {', '.join(record.only or ())} was asked",
        "unchecked": f", the kernel was not run: {one_line(record.why_unchecked)}",
    }[verdict]
    about = f" {one_line(examined.name)}{place}, {examined.depth}, {_time(record.seconds)}{said}"
    return Text.assemble((verdict, f"bold {_STYLES[verdict]}"), about)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
