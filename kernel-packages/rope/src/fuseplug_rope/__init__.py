"""Fused rotary position embeddings, in every form that Hugging Face models write them.

`rope` computes on every device; the kernels that Fuseplug finds are in `fuseplug_rope.kernels`. Importing this package
imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

if TYPE_CHECKING:
    from .functional import rope

__all__ = ["rope"]

__getattr__, __dir__ = lazy(__name__, {"rope": ".functional"})
