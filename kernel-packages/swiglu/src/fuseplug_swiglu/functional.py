"""The gate of an MLP for tensors on whatever device: by the first kernel here that can run there."""

from __future__ import annotations

from torch import Tensor

from fuseplug.functional import module_for

from .kernels import InductorSwiGLUKernel, NpuSwiGluKernel, TritonSwiGLUKernel

_KERNELS = (NpuSwiGluKernel, TritonSwiGLUKernel, InductorSwiGLUKernel)


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: str = "silu",
    variant: str = "plain",
    layout: str = "gate-first",
    limit: float | None = None,
    scale: float | None = None,
    sparsity: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """`fuseplug_swiglu.reference.swiglu`, fused: the same arguments, result up to rounding, and errors.

    On an NPU it is `fuseplug_swiglu.backends.npu.swiglu`; on a GPU `fuseplug_swiglu.backends.triton.swiglu`; elsewhere, or where these
    cannot run, `fuseplug_swiglu.backends.inductor.swiglu`; and without a compiler for that the reference.
    """
    compute = module_for(gate.device.type, _KERNELS).swiglu
    return compute(  # type: ignore[no-any-return]
        gate,
        up,
        activation=activation,
        variant=variant,
        layout=layout,
        limit=limit,
        scale=scale,
        sparsity=sparsity,
        beta=beta,
    )
