"""What kernels on NPUs compute with."""

import torch

from .reference import gated as reference


def gated(x):
    """What is strided is copied; what is empty, the operation does not take."""
    return torch.ops.npu.npu_swiglu(x.contiguous()) if x.numel() else reference(x)


def carelessly_gated(x):
    return torch.ops.npu.npu_swiglu(x)
