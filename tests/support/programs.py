"""Programs that are not compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuseplug_backends.inductor import Program


def by_pytorch(program: Program, *tensors: Tensor) -> Sequence[Tensor]:
    """The results of *program*, computed by PyTorch; to be put in place of ``Program.__call__``."""
    with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        return program.function(*tensors)
