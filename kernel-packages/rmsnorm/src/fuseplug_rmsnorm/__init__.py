"""Fused RMSNorm, in every form that Hugging Face models write it.

`rms_norm` is the functional door; the kernels that Fuseplug finds are in `fuseplug_rmsnorm.kernels`. Importing this
package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .inductor import rms_norm

__all__ = ["rms_norm"]


def __getattr__(name: str) -> Any:
    if name == "rms_norm":
        from .inductor import rms_norm

        return rms_norm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
