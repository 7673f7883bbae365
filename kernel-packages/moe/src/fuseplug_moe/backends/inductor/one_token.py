"""A mixture of experts for one token: its experts one after the other, in the order of its indices.

A decoding step reads the matrices of a few experts, and computes next to nothing. Sorting rows for a grouped matmul
takes up to half as long as that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ... import reference
from ...reference import Experts, Projection


def compute(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor | None:
    """`fuseplug_moe.reference.compute` of x ``(1, hidden)``, without gradients; ``None`` if an index is no expert's."""
    chosen = index[0].tolist()
    if not chosen or not all(0 <= expert < experts.number for expert in chosen):
        return None
    rows = [x.to(experts.dtype)] * len(chosen)
    up = None if experts.up is None else _linear(rows, experts.up, None, chosen, experts)
    gate = _linear(rows, experts.gate_up, experts.gate_up_bias, chosen, experts)
    inner = reference.gated(experts, gate, up).to(reference.first(experts.down).dtype)
    out = _linear(inner.split(1), experts.down, experts.down_bias, chosen, experts)  # type: ignore[no-untyped-call]
    if experts.post is not None:
        out = experts.post(out)
    return reference.weigh(out[None], weights).to(x.dtype)


def _linear(
    rows: Iterable[Tensor], projection: Projection, bias: Tensor | None, chosen: Sequence[int], experts: Experts
) -> Tensor:
    """Each of *rows* ``(1, in)`` times the matrix of the expert at its place in *chosen*: ``(k, out)``."""
    matrices = [projection[expert] if experts.transposed else projection[expert].t() for expert in chosen]
    out = torch.cat([row @ matrix for row, matrix in zip(rows, matrices, strict=True)])
    return out if bias is None else out + bias[chosen]
