"""Fused gated MLPs, SwiGLU and its kin, in every form that Hugging Face models write them.

`swiglu` is the functional door, on every device; the kernels that Fuseplug finds are in `fuseplug_swiglu.kernels`.
Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functional import swiglu

__all__ = ["swiglu"]


def __getattr__(name: str) -> Any:
    if name == "swiglu":
        from .functional import swiglu

        return swiglu
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
