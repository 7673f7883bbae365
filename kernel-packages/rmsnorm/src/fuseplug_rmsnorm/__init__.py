"""Fused RMSNorm, in every form in which Hugging Face models write it.

`rms_norm` and `add_rms_norm` compute on every device; the kernels that Fuseplug finds are in
`fuseplug_rmsnorm.kernels`. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

if TYPE_CHECKING:
    from .functional import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]

__getattr__, __dir__ = lazy(__name__, {"add_rms_norm": ".functional", "rms_norm": ".functional"})
