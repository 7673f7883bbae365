"""What many limits have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import require

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def is_float(name: str, tensor: Tensor) -> None:
    """It has a dtype in which an NPU computes."""
    require(tensor.dtype in FLOATS, name, "float16, bfloat16 or float32", tensor)


def has_dims(name: str, tensor: Tensor, fewest: int, most: int) -> None:
    """It has so many dims."""
    require(fewest <= tensor.dim() <= most, name, f"of {fewest} to {most} dims", tensor)


def is_not_empty(name: str, tensor: Tensor) -> None:
    """It has elements."""
    require(tensor.numel() > 0, name, "not empty", tensor)


def is_contiguous(name: str, tensor: Tensor) -> None:
    """It lies in memory in the order of its elements."""
    require(tensor.is_contiguous(), name, "contiguous", f"strided {tensor.stride()} for {list(tensor.shape)}")


def is_index(name: str, tensor: Tensor) -> None:
    """It has integers."""
    require(tensor.dtype in (torch.int32, torch.int64), name, "int32 or int64", tensor)
