"""``fuseplug cache``."""

from __future__ import annotations

from typing import Annotated

import typer

from fuseplug.configuration import environment, named
from fuseplug.disk_cache import VARIABLE, DiskCache, folder


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Forget everything that is kept.")] = False,
) -> None:
    """Show where passed checks and times of kernels are kept for other processes, and how many; or forget them."""
    where = folder()
    if where is None:
        typer.echo(f"nothing is kept: {named(environment(), VARIABLE)}=off, or there is no home directory")
        return
    answers = {kind: DiskCache(kind, where) for kind in ("checks", "timings")}
    counts = {kind: kept.clear() if clear else len(kept) for kind, kept in answers.items()}
    typer.echo(f"{where}: {', '.join(f'{n} {kind}' for kind, n in counts.items())}{' forgotten' if clear else ''}")
