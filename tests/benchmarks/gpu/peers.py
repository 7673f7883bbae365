"""Ways to make contenders of what may not be installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .contest import COMPILED, Contender, Function, LeftOut

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


def compiled(eager: Make, searched: Callable[[Sequence[Tensor]], bool]) -> list[Contender]:
    """``torch.compile`` of *eager*, as it comes, and for the arguments that are *searched* when it looks for longer.

    That takes it from ten seconds to a minute, which there are not for all shapes.
    """

    def mode(name: str | None) -> Make:
        def make(arguments: Sequence[Tensor]) -> Function:
            if not arguments[0].is_cuda:
                return torch.compile(eager(arguments), backend="eager")  # what is compiled is what is checked there
            return torch.compile(eager(arguments), mode=name, dynamic=False)

        return make

    def searching(arguments: Sequence[Tensor]) -> Function:
        if arguments[0].is_cuda and not searched(arguments):
            raise LeftOut("looked for at one or two shapes only, to save time")
        return mode("max-autotune-no-cudagraphs")(arguments)

    return [Contender(COMPILED, mode(None)), Contender(f"{COMPILED}, max-autotune", searching)]
