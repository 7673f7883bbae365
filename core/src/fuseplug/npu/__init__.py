"""What kernels on Ascend NPUs have in common. Importing this imports neither torch nor torch_npu.

Nothing here ever imports torch_npu: a tensor on an NPU means that it is loaded, and its operations are then
``torch.ops.npu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kernel import NpuKernel

if TYPE_CHECKING:
    from .recomputing import recomputed

__all__ = ["NpuKernel", "recomputed"]


def __getattr__(name: str) -> Any:
    if name == "recomputed":
        from .recomputing import recomputed

        return recomputed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
