"""Makes contenders of functions that may not be installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .problems import COMPILED, Contender, Function, LeftOut

Make = Callable[[Sequence[Tensor]], Function]


def imported(target: str) -> Any:
    """Import what ``"module:name"`` names. Raises ImportError if there is none."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise ImportError(f"{module} has no {name}")
    return found


def of(target: str, call: Callable[..., Any]) -> Make:
    """Make functions that return ``call(imported(target), *arguments)``."""

    def make(_: Sequence[Tensor]) -> Function:
        function = imported(target)
        return lambda *arguments: call(function, *arguments)

    return make


def compiled(eager: Make) -> Contender:
    """``torch.compile`` of *eager*, in its default mode."""
    return Contender(COMPILED, _compiled(eager, None))


def searching(eager: Make, where: Callable[[Sequence[Tensor]], bool]) -> Contender:
    """``torch.compile`` of *eager* with a longer search: up to a minute, so only for arguments that *where* picks.

    For a matmul, grouped or not, the search finds torch's own. So ops that spend their time in matmuls omit this.
    """

    def make(arguments: Sequence[Tensor]) -> Function:
        if arguments[0].is_cuda and not where(arguments):
            raise LeftOut("searched at one or two shapes only, to save time")
        return _compiled(eager, "max-autotune-no-cudagraphs")(arguments)

    return Contender(f"{COMPILED}, max-autotune", make)


def _compiled(eager: Make, mode: str | None) -> Make:
    def make(arguments: Sequence[Tensor]) -> Function:
        if not arguments[0].is_cuda:
            return torch.compile(eager(arguments), backend="eager")  # without a GPU, only the traced program is checked
        return torch.compile(eager(arguments), mode=mode, dynamic=False)

    return make
