"""Fused mixtures of experts, as Hugging Face models write them.

`moe` computes on every device; the kernels that Fuseplug finds are in `fuseplug_moe.kernels`. Importing this package
imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

if TYPE_CHECKING:
    from .functional import moe

__all__ = ["moe"]

__getattr__, __dir__ = lazy(__name__, {"moe": ".functional"})
