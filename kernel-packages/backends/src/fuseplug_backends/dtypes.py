"""The dtypes in which models are run, and for which kernels are written."""

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
    """Whether the dtype of each of *tensors* is one of `MODEL_DTYPES`; ``None`` is skipped."""
    for tensor in tensors:  # noqa: SIM110 - a generator or a list takes the host longer
        if tensor is not None and tensor.dtype not in MODEL_DTYPES:
            return False
    return True


def usual_mixes(mixes: Sequence[Any], device_type: str) -> list[Any]:
    """The mixes in which autocast calls a model on *device_type*, for `fuseplug.Proposal.likely`.

    Args:
        mixes: Named tuples, with the dtype of the main input as ``x``. The first is that of the module.
        device_type: The type of the model's device. Ascend 910A and 310P have no bfloat16, so models train there under
            autocast to float16. Elsewhere autocast to float16 is rare, and compiling a norm or rotation for it would
            take a second or two.

    Returns:
        The *mixes* after the first whose ``x`` is that of the first, or bfloat16, or (on NPUs) float16.
    """
    halves = (torch.bfloat16, torch.float16) if device_type == "npu" else (torch.bfloat16,)
    return [mix for mix in mixes[1:] if mix.x in (mixes[0].x, *halves)]


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype for computing with *tensors*: float32, or wider if one of them is wider; ``None`` is skipped."""
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors if t is not None), torch.float32)
