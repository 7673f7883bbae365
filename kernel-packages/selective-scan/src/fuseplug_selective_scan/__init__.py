"""The selective scan, the recurrence of Mamba in Hugging Face models.

`selective_scan` computes on every device; the kernels that Fuseplug finds are in `fuseplug_selective_scan.kernels`.
Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

if TYPE_CHECKING:
    from .functional import selective_scan

__all__ = ["selective_scan"]

__getattr__, __dir__ = lazy(__name__, {"selective_scan": ".functional"})
