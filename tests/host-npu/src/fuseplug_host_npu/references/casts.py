"""Casts, for which torch_npu has ops of its own, and memory formats, of which the host has only one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import reference

_NUMBERED = {0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16}
_NUMBERED |= {6: torch.float32, 7: torch.float64, 11: torch.bool, 15: torch.bfloat16}
"""Dtypes by torch's numbers for them (c10::ScalarType), for schemas that say int."""


def _dtype(given: torch.dtype | int) -> torch.dtype:
    return given if isinstance(given, torch.dtype) else _NUMBERED[given]


@reference("_npu_dtype_cast", "npu_dtype_cast")
def dtype_cast(input: Tensor, dtype: torch.dtype | int, **_: Any) -> Tensor:  # noqa: A002
    """The values in another dtype."""
    return input.to(_dtype(dtype), copy=True)


@reference("_npu_dtype_cast_backward", "npu_dtype_cast_backward")
def dtype_cast_backward(grad: Tensor, dtype: torch.dtype | int, **_: Any) -> Tensor:
    """The gradient in the dtype of the input."""
    return grad.to(_dtype(dtype), copy=True)


@reference("npu_dtype_cast_")
def dtype_cast_(input: Tensor, src: Tensor) -> Tensor:  # noqa: A002
    """The values of *src*, in the input's dtype."""
    return input.copy_(src)


@reference("npu_format_cast", "npu_format_cast.Tensor", "_npu_format_cast", "_npu_format_cast.aclnn")
def format_cast(input: Tensor, **_: Any) -> Tensor:  # noqa: A002
    """A copy of the values: formats differ only in where the values lie."""
    return input.clone()


@reference("npu_format_cast_", "npu_format_cast_.acl_format")
def format_cast_(input: Tensor, **_: Any) -> Tensor:  # noqa: A002
    """The input itself."""
    return input
