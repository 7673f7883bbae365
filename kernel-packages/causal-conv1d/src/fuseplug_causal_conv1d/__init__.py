"""Fused short causal convolutions for linear attention and state spaces in Hugging Face models.

`causal_conv1d` computes on every device; the kernels that Fuseplug finds are in `fuseplug_causal_conv1d.kernels`.
Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

if TYPE_CHECKING:
    from .functional import causal_conv1d

__all__ = ["causal_conv1d"]

__getattr__, __dir__ = lazy(__name__, {"causal_conv1d": ".functional"})
