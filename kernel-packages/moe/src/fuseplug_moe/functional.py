"""A mixture of experts for tensors on whatever device: by the first kernel here that can run there."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fuseplug.functional import module_for

from .kernels import InductorMoEKernel, NpuFusedMoEKernel, TritonMoEKernel
from .reference import Layout, Projection, Rows

_KERNELS = (NpuFusedMoEKernel, TritonMoEKernel, InductorMoEKernel)


def moe(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Projection,
    down: Projection,
    *,
    up: Projection | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    layout: Layout = "concatenated",
    activation: str | Rows = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    post: Rows | None = None,
    idle: Literal["zero", "none"] = "zero",
) -> Tensor:
    """`fuseplug_moe.reference.moe`, fused: the same arguments, result up to rounding, and errors.

    On an NPU it is `fuseplug_moe.backends.npu.moe`; on a GPU `fuseplug_moe.backends.triton.moe`; elsewhere, or where these
    cannot run, `fuseplug_moe.backends.inductor.moe`; and without a compiler for that the reference.
    """
    compute = module_for(x.device.type, _KERNELS).moe
    return compute(  # type: ignore[no-any-return]
        x,
        top_k_index,
        top_k_weights,
        gate_up,
        down,
        up=up,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        transposed=transposed,
        layout=layout,
        activation=activation,
        limit=limit,
        alpha=alpha,
        post=post,
        idle=idle,
    )
