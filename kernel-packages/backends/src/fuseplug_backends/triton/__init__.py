"""Code shared by kernels written in Triton. Importing this package imports neither torch nor triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

from .kernel import FORMULAS, TritonKernel, interpreted

if TYPE_CHECKING:
    from ..differentiating import (
        differentiable,
        differentiable_linear,
        differentiated_again,
        recomputed,
        recording,
        vjp,
    )
    from ..tracing import transparent
    from .caching import cached_launches
    from .launching import Operation, offsets_fit, operation, shared_memory

__all__ = [
    "FORMULAS",
    "Operation",
    "TritonKernel",
    "cached_launches",
    "differentiable",
    "differentiable_linear",
    "differentiated_again",
    "interpreted",
    "offsets_fit",
    "operation",
    "recomputed",
    "recording",
    "shared_memory",
    "transparent",
    "vjp",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        **dict.fromkeys(
            ("differentiable", "differentiable_linear", "differentiated_again", "recomputed", "recording", "vjp"),
            "..differentiating",
        ),
        "transparent": "..tracing",
        "cached_launches": ".caching",
        **dict.fromkeys(("Operation", "offsets_fit", "operation", "shared_memory"), ".launching"),
    },
)
