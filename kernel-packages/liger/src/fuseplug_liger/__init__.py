"""Liger-Kernel's kernels as Fuseplug kernels: `fuseplug_liger.kernels` declares them.

Importing this package imports neither torch nor Liger-Kernel.
"""

from __future__ import annotations

KERNELS = (
    "liger_fused_linear_cross_entropy",
    "liger_fused_rmsnorm",
    "liger_fused_rope",
    "liger_fused_swiglu",
)
"""The ids of all kernels of this package, for ``apply_all(model, include=KERNELS)``."""

__all__ = ["KERNELS"]
