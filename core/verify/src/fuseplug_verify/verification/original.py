"""Reads the code of an original before any of it is run, and refuses what fused code cannot do."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..data import Example, Refusal
from ..reading.findings import Reading
from ..reading.reader import read
from ..subjects import Subject


def read_original(subject: Subject, examples: Sequence[Example]) -> Reading | Refusal:
    """Read the code of *subject* before any of it is run; or say why no fused code can replace it.

    The code is read first because running code with side effects would cause them. Of the arguments, only strings make
    a difference: the guard lets through the strings of *examples*.
    """
    function: Any = subject.original
    owner = subject.module
    if isinstance(function, nn.Module):
        function, owner = type(function).forward, function
    if not isinstance(function, types.FunctionType):
        return Refusal(f"it is a {type(function).__name__}, whose code cannot be read", kind="unlike")
    reading = read(function, owner, [(example.args, example.kwargs) for example in examples])
    for places, why in (
        (reading.side_effects, "it does more than compute, which a fused kernel would not"),
        (reading.unknown, "what it depends on cannot be read"),
    ):
        # The code of children that the examples replace is not run.
        texts = [place.text for place in places if not (place.inside and place.inside[0] in examples[0].children)]
        if texts:
            more = f" (and {len(texts) - 2} more)" if len(texts) > 2 else ""
            return Refusal(f"{why}: {'; '.join(texts[:2])}{more}", kind="unlike")
    return reading
