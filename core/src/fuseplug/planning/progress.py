"""Shows on a terminal how far a plan has come, if it takes long: compilers need seconds for a kernel."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence

from ..plain_text import one_line
from ..walking import Place

PATIENCE = 1.0
"""Seconds before anything is shown."""


@contextlib.contextmanager
def showing(places: Sequence[Place]) -> Iterator[Iterable[Place]]:
    """Give *places* to be gone through; meanwhile, stderr shows which one it is. In the end, that is wiped out.

    Nothing is shown if stderr is no terminal, or by any but the first process of a distributed run.
    """
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield places
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("checking kernels"), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[where]}"))
    bar = Progress(*columns, console=Console(stderr=True, markup=False), transient=True)
    task = bar.add_task("", total=len(places), where="")

    def one_by_one() -> Iterator[Place]:
        for number, place in enumerate(places):
            bar.update(task, completed=number, where=one_line(place.paths[0] or "the model"))
            yield place

    # By another thread, because it may be a single place that takes long.
    patience = threading.Timer(PATIENCE, bar.start)
    patience.daemon = True
    patience.start()
    try:
        yield one_by_one()
    finally:
        patience.cancel()
        patience.join()
        bar.stop()
