"""What kernels that Inductor compiles have in common. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kernel import InductorKernel

if TYPE_CHECKING:
    from ..differentiating import recording
    from .compiled import Compiled, plain
    from .layout import keeping_order
    from .linear import CompiledLinear

__all__ = ["Compiled", "CompiledLinear", "InductorKernel", "keeping_order", "plain", "recording"]


def __getattr__(name: str) -> Any:
    if name in ("Compiled", "plain"):
        from . import compiled

        return getattr(compiled, name)
    if name == "recording":
        from ..differentiating import recording

        return recording
    if name == "keeping_order":
        from .layout import keeping_order

        return keeping_order
    if name == "CompiledLinear":
        from .linear import CompiledLinear

        return CompiledLinear
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
