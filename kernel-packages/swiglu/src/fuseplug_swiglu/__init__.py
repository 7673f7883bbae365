"""Fused gated MLPs, SwiGLU and its kin, in every form in which Hugging Face models write them.

`swiglu` computes on every device; the kernels that Fuseplug finds are in `fuseplug_swiglu.kernels`. Importing this
package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

if TYPE_CHECKING:
    from .functional import swiglu

__all__ = ["swiglu"]

__getattr__, __dir__ = lazy(__name__, {"swiglu": ".functional"})
