"""The functions of the kernels for NPUs."""

import torch

from .reference import gated as reference


def gated(x):
    """Copies strided inputs, and leaves empty ones, which the operation refuses, to the reference."""
    return torch.ops.npu.npu_swiglu(x.contiguous()) if x.numel() else reference(x)


def carelessly_gated(x):
    return torch.ops.npu.npu_swiglu(x)
