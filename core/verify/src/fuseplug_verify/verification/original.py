"""Reads the code of an original before any of it is run, and refuses what fused code cannot do."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..data import Example, Refusal
from ..reading import Finding, Reading, read
from ..subjects import Subject


def read_original(subject: Subject, examples: Sequence[Example]) -> Reading | Refusal:
    """Read the code of *subject* before any of it is run; or say why no kernel can replace it.

    It is read first because running code with side effects would cause them. Of the arguments only strings make a
    difference: the guard lets through those of *examples*.
    """
    function: Any = subject.original
    owner = subject.module
    if isinstance(function, nn.Module):
        function, owner = type(function).forward, function
    if not isinstance(function, types.FunctionType):
        return Refusal(f"it is a {type(function).__name__}, whose code cannot be read", kind="unlike")
    return read(function, owner, [(each.args, each.kwargs) for each in examples])


def forbidden(reading: Reading, replaced: Sequence[str]) -> Refusal | None:
    """Refuse what *reading* found that fused code cannot do.

    Args:
        reading: Of the original.
        replaced: The children that the examples replace, whose own code is not run.
    """

    def own(findings: Sequence[Finding]) -> list[str]:
        return [finding.text for finding in findings if not (finding.inside and finding.inside[0] in replaced)]

    for findings, why in (
        (reading.side_effects, "it does more than compute, and a fused one would not"),
        (reading.unknown, "what it depends on cannot be read"),
    ):
        if found := own(findings):
            more = f" (and {len(found) - 2} more)" if len(found) > 2 else ""
            return Refusal(f"{why}: {'; '.join(found[:2])}{more}", kind="unlike")
    return None
