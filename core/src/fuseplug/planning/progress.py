"""Shows on a terminal how far a plan has come, if it takes long: compilers need seconds for a kernel."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ..report.plain_text import one_line
from ..report.ranks import rank

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds before anything is shown."""


@contextlib.contextmanager
def showing(items: Sequence[T], doing: str, named: Callable[[T], str]) -> Iterator[Iterable[T]]:
    """Give *items* to iterate over, and show the current item on stderr meanwhile. The display is erased at the end.

    Nothing is shown if stderr is not a terminal. In a distributed run, only the first process shows anything.

    Args:
        items: The items that take time.
        doing: What is done with each item.
        named: Returns the name of an item.
    """
    if not sys.stderr.isatty() or rank() != 0:
        yield items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(doing), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[where]}"))
    bar = Progress(*columns, console=Console(stderr=True, markup=False), transient=True)
    task = bar.add_task("", total=len(items), where="")

    def one_by_one() -> Iterator[T]:
        for number, item in enumerate(items):
            bar.update(task, completed=number, where=one_line(named(item)))
            yield item

    # In another thread, because a single item may take long.
    patience = threading.Timer(PATIENCE, bar.start)
    patience.daemon = True
    patience.start()
    try:
        yield one_by_one()
    finally:
        patience.cancel()
        patience.join()
        bar.stop()
