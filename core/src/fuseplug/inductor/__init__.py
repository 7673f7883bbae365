"""What kernels that Inductor compiles have in common. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy
from .kernel import InductorKernel

if TYPE_CHECKING:
    from ..differentiating import recording
    from .compiled import Compiled, plain
    from .layout import keeping_order
    from .linear import CompiledLinear

__all__ = ["Compiled", "CompiledLinear", "InductorKernel", "keeping_order", "plain", "recording"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Compiled": ".compiled",
        "CompiledLinear": ".linear",
        "keeping_order": ".layout",
        "plain": ".compiled",
        "recording": "..differentiating",
    },
)
