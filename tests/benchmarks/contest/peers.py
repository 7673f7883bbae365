"""Ways to make contenders of what may not be installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .problems import COMPILED, Contender, Function, LeftOut

Make = Callable[[Sequence[Tensor]], Function]


def imported(target: str) -> Any:
    """What ``"module:name"`` stands for. Raises ImportError."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise ImportError(f"{module} has no {name}")
    return found


def of(target: str, call: Callable[..., Any]) -> Make:
    """Make ``call(what is imported, *arguments)``."""

    def make(_: Sequence[Tensor]) -> Function:
        function = imported(target)
        return lambda *arguments: call(function, *arguments)

    return make


def compiled(eager: Make) -> Contender:
    """``torch.compile`` of *eager*, as it comes."""
    return Contender(COMPILED, _compiled(eager, None))


def searching(eager: Make, where: Callable[[Sequence[Tensor]], bool]) -> Contender:
    """The same, when it looks for longer; only for arguments *where* there is time for that: it takes up to a minute.

    What it finds for a matmul, grouped or not, is torch's own: those who spend their time in one do without this.
    """

    def make(arguments: Sequence[Tensor]) -> Function:
        if arguments[0].is_cuda and not where(arguments):
            raise LeftOut("looked for at one or two shapes only, to save time")
        return _compiled(eager, "max-autotune-no-cudagraphs")(arguments)

    return Contender(f"{COMPILED}, max-autotune", make)


def _compiled(eager: Make, mode: str | None) -> Make:
    def make(arguments: Sequence[Tensor]) -> Function:
        if not arguments[0].is_cuda:
            return torch.compile(eager(arguments), backend="eager")  # what is compiled is what is checked there
        return torch.compile(eager(arguments), mode=mode, dynamic=False)

    return make
