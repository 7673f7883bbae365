"""The dtypes in which models are run, which are those that kernels are written for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["MODEL_DTYPES", "have_model_dtypes", "working_dtype"]

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes in which models are run; in float64 they are only verified."""


def have_model_dtypes(*tensors: Tensor | None) -> bool:
    """Whether the dtype of each of *tensors* is one of `MODEL_DTYPES`; ``None`` is passed over."""
    for tensor in tensors:  # noqa: SIM110 - a generator takes the host longer
        if tensor is not None and tensor.dtype not in MODEL_DTYPES:
            return False
    return True


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype in which *tensors* are computed with: float32, or wider if one of them is; ``None`` is passed over."""
    dtypes = (tensor.dtype for tensor in tensors if tensor is not None)
    return functools.reduce(torch.promote_types, dtypes, torch.float32)
