"""``fuseplug new``. Importing this module imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .known_ops import KNOWN_OPS
from .request import BACKENDS, request_of
from .writing import write


def new(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The name of the distribution: layernorm, or fuseplug-layernorm."),
    ],
    op: Annotated[
        str,
        typer.Option(
            metavar="OP",
            help=f"{', '.join(KNOWN_OPS)}: a better kernel for that op. Any other name is a new op; by default it is "
            "NAME.",
        ),
    ] = "",
    backend: Annotated[str, typer.Option(help=f"What the kernel is written with: {', '.join(BACKENDS)}.")] = "inductor",
    params: Annotated[
        str,
        typer.Option(
            help="What a module with a new op has: parameters and buffers, and numbers with a value, as in "
            "weight,bias,eps=1e-5. Each tensor is a vector of the width of a row."
        ),
    ] = "",
    into: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write it. By default ./fuseplug-NAME.")
    ] = None,
) -> None:
    """Write a distribution with a kernel that works on this CPU, its tests and all else, to be changed into yours."""
    request = request_of(name, op=op, backend=backend, params=params)
    folder = into or Path(request.distribution)
    written, edits = write(request, folder)
    typer.echo(f"written to {folder}: {request.distribution}, with the kernel {request.kernel_id}")
    for path in written:
        typer.echo(f"  {path.as_posix():<40} {edits.get(path, '')}".rstrip())
    commands = (f"cd {folder}", 'pip install -e ".[testing]"', "pytest")
    typer.echo("\n".join(["\nNow:", *(f"  {command}" for command in commands)]))
    # Only the tests know how to stand in for a device that is not here.
    again = f"fuseplug check {request.kernel_id} --quick" if backend == "inductor" else "pytest"
    typer.echo("\nThen change the files that have a note above, one after the other, and check after each:")
    typer.echo(f"  {again}")
    typer.echo("  fuseplug plan MODEL    # where it is used; a folder with a config.json, or an id of the Hub")
