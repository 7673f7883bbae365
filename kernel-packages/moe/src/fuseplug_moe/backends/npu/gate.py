"""The gate between the two projections of an expert, in one launch where torch_npu has an operation for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fuseplug_backends.npu import cann_has, recomputed

from ... import reference
from ...reference import GATES


def apply_gate(gate: Tensor, up: Tensor | None, name: str, layout: str, limit: float | None, alpha: float) -> Tensor:
    """`reference.apply_gate`: the same arguments and result.

    A separate gate and up stay separate: joining them for ``npu_swiglu`` reads and writes seven times the size of one
    of them, and torch's two operations do so five times.
    """
    if up is None and layout == "concatenated" and name == "silu":
        result: Tensor = torch.ops.npu.npu_swiglu(gate.contiguous(), dim=-1)
        return result
    row = GATES[name]
    clamped = row.clamp == "before" and row.row.formula == "swish" and layout != "ungated"
    if up is None and (
        (clamped and limit is not None and 0 < limit < math.inf and cann_has("npu_clipped_swiglu", 1, 64))
        or (row.clamp is None and row.row.formula in _GEGLU and layout == "concatenated")
    ):
        return _fused(gate.contiguous(), name, layout, limit, alpha)
    return reference.apply_gate(gate, up, name, layout, limit, alpha)


_GEGLU = {"gelu": 0, "gelu_tanh": 1}
"""The argument ``approximate`` of ``npu_geglu``, by the formula of the activation."""


def _forward(gate_up: Tensor, name: str, layout: str, limit: float | None, alpha: float) -> Tensor:
    gated: Tensor
    row = GATES[name]
    if row.clamp is None:
        gated, _ = torch.ops.npu.npu_geglu(gate_up, dim=-1, approximate=_GEGLU[row.row.formula], activate_left=True)
    else:
        gated = torch.ops.npu.npu_clipped_swiglu(
            gate_up,
            dim=-1,
            alpha=row.row.steepness(alpha),
            limit=limit,
            bias=row.offset,
            interleaved=layout == "interleaved",
        )
    return gated


def _formula(gate_up: Tensor, name: str, layout: str, limit: float | None, alpha: float) -> Tensor:
    return reference.apply_gate(gate_up, None, name, layout, limit, alpha)


# npu_clipped_swiglu has no derivative. The derivative of npu_geglu also keeps the activated gate, and cannot be traced:
# its meta function lacks two of the arguments.
_fused = recomputed(_forward, _formula)
