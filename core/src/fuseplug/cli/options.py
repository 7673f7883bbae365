"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Include = Annotated[list[str] | None, typer.Option(help="Use only this kernel or op; may be repeated.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Leave out this kernel or op; may be repeated.")]
Only = Annotated[list[str] | None, typer.Option(help="Only modules whose path fits this glob; repeatable.")]
Skip = Annotated[list[str] | None, typer.Option(help="No modules whose path fits this glob; repeatable.")]
Allow = Annotated[
    list[str] | None, typer.Option(help="What you agree to give up, such as lazy_logits; may be repeated.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
