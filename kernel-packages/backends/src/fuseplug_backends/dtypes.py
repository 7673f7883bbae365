"""The dtypes in which models are run, which are those that kernels are written for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["MODEL_DTYPES", "have_model_dtypes", "usual_mixes", "working_dtype"]

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes in which models are run; in float64 they are only verified."""


def have_model_dtypes(*tensors: Tensor | None) -> bool:
    """Whether the dtype of each of *tensors* is one of `MODEL_DTYPES`; ``None`` is passed over."""
    for tensor in tensors:  # noqa: SIM110 - a generator or a list takes the host longer
        if tensor is not None and tensor.dtype not in MODEL_DTYPES:
            return False
    return True


def usual_mixes(mixes: Sequence[Any], device_type: str) -> list[Any]:
    """For `fuseplug.Proposal.likely`: the mixes in which autocast calls a model on *device_type*.

    Args:
        mixes: Named tuples, with the dtype of the main input as ``x``. The first is that of the module.
        device_type: Where. Ascend 910A and 310P have no bfloat16, and models train there under autocast to float16.
            Elsewhere that is rare, and a norm or rotation takes a second or two to compile for it.

    Returns:
        Those of *mixes*, besides the first, whose ``x`` is as in the first, or bfloat16, or on NPUs float16.
    """
    halves = (torch.bfloat16, torch.float16) if device_type == "npu" else (torch.bfloat16,)
    return [mix for mix in mixes[1:] if mix.x in (mixes[0].x, *halves)]


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype in which *tensors* are computed with: float32, or wider if one of them is; ``None`` is passed over."""
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors if t is not None), torch.float32)
