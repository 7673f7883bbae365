"""The table of references, one row for each op that torch has no kernel of the CPU for. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Reference = TypeVar("Reference", bound=Callable[..., Any])

table: dict[str, Callable[..., Any]] = {}
_listeners: list[Callable[[], None]] = []


def reference(*names: str) -> Callable[[Reference], Reference]:
    """Decorate a function that computes an op of the NPU on the CPU: ``HostNPU`` runs it in the place of the kernel.

    It is given what the op was called with, by the names in its schema, without what has its default value; tensors as
    tensors of the CPU with the same memory. It returns what the op returns, on the CPU. It runs below autograd:
    gradients are the business of the op's own formulas. A second one for an op takes the place of the first.

    Args:
        *names: What ops it computes: ``"npu_swiglu"``, ``"npu_grouped_matmul.List"`` for an overload, or
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
    """Have *listener* called whenever there is a new reference."""
    _listeners.append(listener)
