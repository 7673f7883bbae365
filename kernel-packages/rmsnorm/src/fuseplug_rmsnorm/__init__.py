"""Fused RMSNorm, in every form that Hugging Face models write it.

`rms_norm` and `add_rms_norm` are the functional door, on every device; the kernels that Fuseplug finds are in
`fuseplug_rmsnorm.kernels`. Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functional import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import functional

        return getattr(functional, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
