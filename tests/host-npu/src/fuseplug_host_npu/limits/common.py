"""Requirements that many limits share."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import require

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def is_float(name: str, tensor: Tensor) -> None:
    """Require a dtype in which an NPU computes."""
    require(tensor.dtype in FLOATS, name, "float16, bfloat16 or float32", tensor)


def has_dims(name: str, tensor: Tensor, fewest: int, most: int) -> None:
    """Require *fewest* to *most* dims."""
    require(fewest <= tensor.dim() <= most, name, f"of {fewest} to {most} dims", tensor)


def is_not_empty(name: str, tensor: Tensor) -> None:
    """Require at least one element."""
    require(tensor.numel() > 0, name, "not empty", tensor)


def is_contiguous(name: str, tensor: Tensor) -> None:
    """Require contiguous memory."""
    require(tensor.is_contiguous(), name, "contiguous", f"strided {tensor.stride()} for {list(tensor.shape)}")


def is_index(name: str, tensor: Tensor) -> None:
    """Require int32 or int64."""
    require(tensor.dtype in (torch.int32, torch.int64), name, "int32 or int64", tensor)
