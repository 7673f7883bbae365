"""Progress: a bar for a terminal, a line now and then for a log."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 10.0


def progress(items: Sequence[T], label: str, note: Callable[[], str] = str) -> Iterator[T]:
    """Yield *items* and show the progress, with the text that *note* returns."""
    return _bar(items, label, note) if sys.stdout.isatty() else _lines(items, label, note)


def _bar(items: Sequence[T], label: str, note: Callable[[], str]) -> Iterator[T]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(label, total=len(items), note="")
        for item in items:
            yield item
            bar.update(task, advance=1, note=note())


def _lines(items: Sequence[T], label: str, note: Callable[[], str]) -> Iterator[T]:
    start = last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES or done == len(items):
            print(f"  {label}: {done}/{len(items)}, {now - start:.0f} s  {note()}".rstrip(), flush=True)
            last = now
