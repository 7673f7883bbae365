"""Fused mixtures of experts, as Hugging Face models write them.

`moe` is the functional door, on every device; the kernels that Fuseplug finds are in `fuseplug_moe.kernels`.
Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functional import moe

__all__ = ["moe"]


def __getattr__(name: str) -> Any:
    if name == "moe":
        from .functional import moe

        return moe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
