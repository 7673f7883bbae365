"""What autocast makes of the matrices of experts whose originals multiply as it says."""

from __future__ import annotations

import torch
from torch import Tensor

from .mixes import DTYPES


def narrowed(x: Tensor, matrix: Tensor) -> Tensor:
    """*matrix*, of any shape, as a matrix product takes it beside *x*: under autocast, in the dtype of that.

    The kernels compute in the dtype of the matrices, so these decide.
    """
    kind = x.device.type
    if matrix.dtype not in DTYPES or not torch.is_autocast_enabled(kind):
        return matrix
    return matrix.to(torch.get_autocast_dtype(kind))
