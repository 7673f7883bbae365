"""What kernels written in Triton have in common. Importing this imports neither torch nor triton."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .kernel import TritonKernel

if TYPE_CHECKING:
    from ..differentiating import differentiated_again, recording, vjp
    from .launching import Operation, operation, transparent

__all__ = ["Operation", "TritonKernel", "differentiated_again", "operation", "recording", "transparent", "vjp"]

_HOMES = {
    **dict.fromkeys(("differentiated_again", "recording", "vjp"), "fuseplug.differentiating"),
    **dict.fromkeys(("Operation", "operation", "transparent"), "fuseplug.triton.launching"),
}
"""What needs torch, and the module that has it."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
