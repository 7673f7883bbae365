"""Which kernels are called where a model trains under autocast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fuseplug import Applied
from fuseplug.patching.counting import tried

from .feeding import Call, step

DTYPE = torch.bfloat16
"""What it casts to."""


def raised_under_autocast(model: nn.Module, calls: Sequence[Call]) -> dict[str, str]:
    """What a step of *model*, unfused, raises under autocast; empty if it runs."""
    try:
        step(model, calls, autocast=DTYPE)
    except Exception as error:
        return {"unfused": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {}


def under_autocast(applied: Applied, model: nn.Module, calls: Sequence[Call]) -> dict[str, dict[str, Any]]:
    """The calls of a step of *model*, which *applied* fused, under autocast: by op, how many were whose.

    Raises:
        Exception: Whatever the step raises.
    """
    ops = {(entry.paths, str(entry.target)): entry.op for entry in applied.report.fused}
    of_path = {(path, target): op for (paths, target), op in ops.items() for path in paths}
    found: dict[str, dict[str, Any]] = {}
    for each in tried(applied.patches, lambda: step(model, calls, autocast=DTYPE)):
        op = of_path[each.paths[0], str(each.target)]
        row = found.setdefault(op, {"kernel": 0, "original": 0, "why": []})
        row["kernel"] += each.fused
        row["original"] += each.original
        row["why"] += [why for why in each.reasons if why not in row["why"]]
    return found
