"""Removes what nobody wants to publish from a text: names of people and machines, and secrets."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
from collections.abc import Iterator, Mapping

SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
"""Parts of the names of environment variables whose values are secret."""

_ALWAYS = (
    (r"(?<=://)[^\s/@]+(?=@)", "<login>"),
    (r"\b(?:hf|gh[opsu]|github_pat|glpat|pypi|sk)[_-][\w-]{16,}", "<token>"),
    (r"(?<=/home/)[^\s/'\":<]+|(?<=/Users/)[^\s/'\":<]+", "<user>"),
)
"""Patterns, with what replaces them: logins in addresses, tokens of well-known services, homes of other users."""


def redacted(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """*text* without logins, tokens, homes, the names of the user and the machine, and the secrets of *environ*."""
    for variable, value in environ.items():
        if SECRET.search(variable):
            text = text.replace(f"{variable}={value}", f"{variable}=<secret>")
            text = text.replace(value, "<secret>") if len(value) > 5 else text  # or every "true" would go
    for pattern, instead in (*_own(), *_ALWAYS):
        text = re.sub(pattern, instead, text)
    return text


def _own() -> Iterator[tuple[str, str]]:
    if home := os.path.expanduser("~").rstrip("/"):  # noqa: PTH111 - Path.home raises where there is none
        yield rf"{re.escape(home)}(?![\w.-])", "~"
    with contextlib.suppress(Exception):  # the error for a user without a name depends on the version of Python
        user = re.escape(getpass.getuser())
        # Only in a path or an address, because a user may be called npu or torch. "root" names nobody.
        yield rf"(?!root\b)(?:(?<=/){user}(?![\w.-])|(?<![\w.-]){user}(?=@))", "<user>"
    names = {platform.node(), platform.node().partition(".")[0]} - {"", "localhost"}
    if hosts := "|".join(map(re.escape, sorted(names, key=len, reverse=True))):
        yield rf"(?<![\w.-])(?:{hosts})(?![\w-])", "<host>"
