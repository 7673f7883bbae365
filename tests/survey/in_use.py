"""Finds out which kernels compute calls when a model trains under autocast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fuseplug import Applied
from fuseplug.patching.counting import tried

from .feeding import Call, step

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes to which autocast casts, by their names in records."""


def under_autocast(
    applied: Applied, model: nn.Module, calls: Sequence[Call], unfused: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Who computes the calls in a step of *model*, which *applied* fused, under autocast to each dtype.

    By name of the dtype and op: how many calls the kernel computed, how many the original, and why. For a dtype in
    *unfused*, with which the unfused model raises, the error instead.

    Raises:
        Exception: Whatever the step raises for a dtype with which the unfused model raises nothing.
    """
    return {
        name: {"unfused": unfused[name]} if name in unfused else _by_op(applied, model, calls, dtype)
        for name, dtype in DTYPES.items()
    }


def raised_under_autocast(model: nn.Module, calls: Sequence[Call]) -> dict[str, str]:
    """The errors that a step of the unfused *model* raises under autocast, by name of the dtype."""
    raised = {}
    for name, dtype in DTYPES.items():
        try:
            step(model, calls, autocast=dtype)
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return raised


def _by_op(applied: Applied, model: nn.Module, calls: Sequence[Call], dtype: torch.dtype) -> dict[str, Any]:
    ops = {entry.kernel_id: entry.op for entry in applied.report.fused}
    rows: dict[str, Any] = {}
    for counted in tried(applied.patches, lambda: step(model, calls, autocast=dtype)):
        row = rows.setdefault(ops[counted.kernel_id], {"kernel": 0, "original": 0, "why": []})
        row["kernel"] += counted.fused
        row["original"] += counted.original
        row["why"] += [why for why in counted.reasons if why not in row["why"]]
    return rows
