"""Measures what the installed kernels gain in a model on this machine: checks, times by turns, and shows tables.

A model is built with random weights from its config, because neither time nor rounding depends on what it has learnt.
All contenders share these weights. `compare` is what ``fuseplug bench`` runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

if TYPE_CHECKING:
    from ..measuring.turns import by_turns, spread
    from .comparing import Benchmark, compare
    from .dtypes import emulates_bfloat16
    from .memory import peak_memory
    from .this_machine import machine

__all__ = ["Benchmark", "by_turns", "compare", "emulates_bfloat16", "machine", "peak_memory", "spread"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Benchmark": ".comparing",
        "by_turns": "..measuring.turns",
        "compare": ".comparing",
        "emulates_bfloat16": ".dtypes",
        "machine": ".this_machine",
        "peak_memory": ".memory",
        "spread": "..measuring.turns",
    },
)
