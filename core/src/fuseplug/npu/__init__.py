"""What kernels on Ascend NPUs have in common. Importing this imports neither torch nor torch_npu.

Nothing here ever imports torch_npu: a tensor on an NPU means that it is loaded, and its operations are then
``torch.ops.npu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy
from .kernel import NpuKernel

if TYPE_CHECKING:
    from ..differentiating import recomputed
    from .differentiating import first_order

__all__ = ["NpuKernel", "first_order", "recomputed"]

__getattr__, __dir__ = lazy(__name__, {"first_order": ".differentiating", "recomputed": "..differentiating"})
