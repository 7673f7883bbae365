"""A function as a program that Inductor compiles when it is first called."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch

from ..torch_private import widest_vectors_work

_serial = itertools.count(1)


def program_of(function: Callable[..., Any], formula: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """*function* compiled, without a graph break, under a name of its own.

    Args:
        function: What is compiled.
        formula: What it computes; named in what the compiler says of it.
        device_type: Of its tensors.
    """
    settings = _settings_on_cpu() if device_type == "cpu" else None
    return torch.compile(named(function, formula), fullgraph=True, options=settings)


def named(function: Callable[..., Any], formula: Callable[..., Any]) -> Callable[..., Any]:
    """*function* with a code object and a name that no other has.

    Dynamo counts recompilations by code object, and remembers by file, line and name which sizes were seen to vary:
    under one name, the width would be one.
    """
    name = f"{formula.__name__}_{function.__name__}_{next(_serial)}"
    return types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, name, closure=function.__closure__
    )


@functools.cache
def _settings_on_cpu() -> dict[str, Any] | None:
    """What Inductor is told about this CPU.

    Before its first program Inductor compiles and loads small programs for each vector instruction set of the CPU: six
    on one with AVX-512, which take 5 s. The sets contain each other, so the widest stands for all.
    """
    return {"cpp.vec_isa_ok": True} if widest_vectors_work() else None
