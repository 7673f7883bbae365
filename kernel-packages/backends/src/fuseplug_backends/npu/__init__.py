"""Code shared by kernels for Ascend NPUs. Importing this package imports neither torch nor torch_npu.

No module here ever imports torch_npu: a tensor on an NPU means that torch_npu is loaded, and its operations are then
in ``torch.ops.npu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

from .kernel import NpuKernel

if TYPE_CHECKING:
    from ..differentiating import recomputed
    from .differentiating import first_order
    from .here import cann_has, is_950

__all__ = ["NpuKernel", "cann_has", "first_order", "is_950", "recomputed"]

__getattr__, __dir__ = lazy(
    __name__,
    {"cann_has": ".here", "first_order": ".differentiating", "is_950": ".here", "recomputed": "..differentiating"},
)
