"""State space duality, the recurrence of Mamba-2 in Hugging Face models.

`ssd` computes on every device; the kernels that Fuseplug finds are in `fuseplug_ssd.kernels`. Importing this package
does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

if TYPE_CHECKING:
    from .functional import ssd

__all__ = ["ssd"]

__getattr__, __dir__ = lazy(__name__, {"ssd": ".functional"})
