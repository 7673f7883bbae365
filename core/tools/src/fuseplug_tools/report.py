"""``fuseplug report``."""

from __future__ import annotations

import contextlib
import io
import os
import re
import traceback
from typing import Annotated

import typer

from fuseplug.cli import main

from .redaction import redacted

VARIABLES = re.compile("ASCEND_|CUDA_|FUSEPLUG_|HCCL_|HF_|NPU_|OMP_|PYTORCH_|TASK_QUEUE|TORCH|TRITON_")
"""How names of environment variables begin if they change what torch, transformers or kernels do."""

app = typer.Typer(add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True})
def report(
    plan: Annotated[list[str] | None, typer.Argument(metavar="[MODEL] [OPTION]", help="As of `fuseplug plan`.")] = None,
) -> None:
    """Print what to paste into an issue: this machine, the settings, the environment and the plan of a model.

    The home directory, the names of the user and of the machine, logins and tokens are left out.
    """
    commands = [("doctor",), *([("plan", *plan)] if plan else [])]
    variables = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if VARIABLES.match(name)]
    listed = "\n".join(["environment variables:", *(variables or ["none that matters"])])
    typer.echo(redacted("\n\n".join([*(_output(*command) for command in commands), listed])))


def _output(*command: str) -> str:
    """Run a command; return its command line, what it prints on both streams, and how it ends."""
    with io.StringIO() as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        out.write(f"$ fuseplug {' '.join(command)}\n")
        try:
            main(command)
        except SystemExit as end:
            out.write(f"exit status {end.code or 0}\n")
        except Exception:  # noqa: BLE001 - an issue is written about such an error
            traceback.print_exc()
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
