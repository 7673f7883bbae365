"""What kernels written in Triton have in common. Importing this imports neither torch nor triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kernel import TritonKernel

if TYPE_CHECKING:
    from ..differentiating import vjp
    from .launching import Operation, operation, transparent

__all__ = ["Operation", "TritonKernel", "operation", "transparent", "vjp"]


def __getattr__(name: str) -> Any:
    if name == "vjp":
        from ..differentiating import vjp

        return vjp
    if name in __all__:
        from . import launching

        return getattr(launching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
