"""Tables in which names stay whole, so that they can be searched for and copied, on a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_STYLES = {"ready": "green", "ok": "green", "broken": "red", "conflict": "red", "in conflict": "red", "fail": "red"}

UNLIMITED = 1 << 14
"""The width of output that is no terminal: no line is wrapped there."""


class _Unpadded(NamedTuple):
    """Writes to *stream*, which is no terminal, without the blanks that fill a cell at the end of a line."""

    stream: TextIO

    def write(self, text: str) -> int:
        return self.stream.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def console(*, stderr: bool = False) -> Console:
    """The console of a command, as wide as the terminal or ``COLUMNS`` says; without either, no line is wrapped."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    file: Any = stream if stream.isatty() else _Unpadded(stream)
    width = None if stream.isatty() or os.environ.get("COLUMNS") else UNLIMITED
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def with_whole_words(table: Table, width: int, folded: Collection[str] = ()) -> Table:
    """Make the columns of *table* no narrower than their longest words, as far as *width* has room; return *table*.

    Args:
        table: A table whose cells are strings and ``rich.text.Text``.
        width: The width of the console.
        folded: The columns whose words may be broken, by the first line of their header.
    """
    for column in table.columns:
        words = [word for cell in (column.header, *column.cells) for word in str(cell).split()]
        longest = max(map(len, words), default=0)
        if str(column.header).partition("\n")[0] not in folded and longest <= width:
            column.min_width = longest
            width -= longest + 2
    return table


def empty_table(*columns: str, title: str | None = None, expand: bool = False) -> Table:
    """A table without rows, as the report and all commands print them."""
    from rich import box
    from rich.table import Table

    layout: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    table = Table(title=title, pad_edge=False, collapse_padding=True, expand=expand, **layout)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_table(out: Console, table: Table, *folded: str) -> None:
    """Print *table*; the words in the columns *folded* may be broken."""
    out.print(with_whole_words(table, out.width, folded))


def state_text(state: str) -> Text:
    """The *state* of a kernel or of a check, in its colour."""
    from rich.text import Text

    return Text(state, _STYLES.get(state, "yellow"))


def print_json(data: Any) -> None:
    """Print *data* as JSON."""
    typer.echo(json.dumps(data, indent=2, default=str))
