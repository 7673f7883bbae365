"""``fuseplug check``. The conformance kit is another distribution, so it is imported only when it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from fuseplug.cli.options import AsJson
from fuseplug.errors import FuseplugError


def check(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID",
            help="The ids of installed kernels, distribution:id, or package.module:Class. By default every installed "
            "kernel that can run here.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where they run. The default is the first of their device types that is here.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less than a minute: everything of one specimen, and little of two more.")
    ] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Every edge on every specimen at every size; takes long.")
    ] = False,
    checks: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this check; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether kernels are right, with the conformance kit; exit with 1 if one is not, or could not be run."""
    try:
        import fuseplug_testing  # noqa: F401 - to see whether it is installed
    except ModuleNotFoundError as error:
        raise FuseplugError('`fuseplug check` needs the conformance kit: pip install "fuseplug[testing]"') from error
    from fuseplug_testing.command import check as run

    code = run(kernels or (), device=device, quick=quick, thorough=thorough, checks=checks or None, as_json=as_json)
    if code:
        raise typer.Exit(code)
