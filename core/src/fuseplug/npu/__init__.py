"""What kernels on Ascend NPUs have in common. Importing this imports neither torch nor torch_npu.

Nothing here ever imports torch_npu: a tensor on an NPU means that it is loaded, and its operations are then
``torch.ops.npu``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .kernel import NpuKernel

if TYPE_CHECKING:
    from .differentiating import first_order
    from .recomputing import recomputed

__all__ = ["NpuKernel", "first_order", "recomputed"]

_HOMES = {"first_order": "differentiating", "recomputed": "recomputing"}
"""What needs torch, and the module that has it."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
