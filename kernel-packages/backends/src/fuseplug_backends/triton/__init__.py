"""What kernels written in Triton have in common. Importing this imports neither torch nor triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

from .kernel import FORMULAS, TritonKernel, interpreted

if TYPE_CHECKING:
    from ..differentiating import differentiated_again, recomputed, recording, vjp
    from .launching import Operation, offsets_fit, operation, shared_memory, transparent

__all__ = [
    "FORMULAS",
    "Operation",
    "TritonKernel",
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
        **dict.fromkeys(("differentiated_again", "recomputed", "recording", "vjp"), "..differentiating"),
        **dict.fromkeys(("Operation", "offsets_fit", "operation", "shared_memory", "transparent"), ".launching"),
    },
)
