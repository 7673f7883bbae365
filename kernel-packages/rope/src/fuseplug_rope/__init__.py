"""Fused rotary position embeddings, in every form that Hugging Face models write them.

`rope` is the functional door, on every device; the kernels that Fuseplug finds are in `fuseplug_rope.kernels`.
Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functional import rope

__all__ = ["rope"]


def __getattr__(name: str) -> Any:
    if name == "rope":
        from .functional import rope

        return rope
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
