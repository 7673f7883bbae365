"""The table of references, one row for each op that torch's CPU kernels do not cover. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Reference = TypeVar("Reference", bound=Callable[..., Any])

table: dict[str, Callable[..., Any]] = {}
_listeners: list[Callable[[], None]] = []


def reference(*names: str) -> Callable[[Reference], Reference]:
    """Decorate a function that computes an op of the NPU on the CPU: ``HostNPU`` runs it in the place of the kernel.

    The function gets the arguments of the call by their names in the op's schema, without those that have their default
    value. Its tensors are CPU tensors with the same memory. It returns the op's results on the CPU. It runs below
    autograd: the op's own formulas compute gradients. A second function for an op takes the place of the first.

    Args:
        *names: The ops that the function computes: ``"npu_swiglu"``, ``"npu_grouped_matmul.List"`` for an overload, or
            ``"my_library::my_op"`` for another library than torch_npu's.
    """

    def register(function: Reference) -> Reference:
        for name in names:
            table[qualified(name)] = function
        for listener in _listeners:
            listener()
        return function

    return register


def qualified(name: str) -> str:
    """The name with its library: ``npu_swiglu`` is ``npu::npu_swiglu``."""
    return name if "::" in name else f"npu::{name}"


def when_added(listener: Callable[[], None]) -> None:
    """Call *listener* whenever a reference is added."""
    _listeners.append(listener)
