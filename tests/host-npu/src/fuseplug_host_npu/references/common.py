"""What all references share."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """*tensor* in the precision in which references compute: float32, or float64 for float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
