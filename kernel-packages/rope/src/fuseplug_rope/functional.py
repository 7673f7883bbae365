"""Rotary position embedding for tensors on whatever device: by the first kernel here that can run there."""

from __future__ import annotations

from torch import Tensor

from fuseplug.functional import module_for

from .kernels import InductorRoPEKernel, NpuRoPEKernel, TritonRoPEKernel

_KERNELS = (NpuRoPEKernel, TritonRoPEKernel, InductorRoPEKernel)


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, variant: str = "half"
) -> tuple[Tensor, Tensor | None]:
    """`fuseplug_rope.reference.rope`, fused: the same arguments, result up to rounding, and errors.

    On an NPU it is `fuseplug_rope.backends.npu.rope`; on a GPU `fuseplug_rope.backends.triton.rope`; elsewhere, or where these
    cannot run, `fuseplug_rope.backends.inductor.rope`; and without a compiler for that the reference.
    """
    compute = module_for(q.device.type, _KERNELS).rope
    return compute(q, k, cos, sin, variant=variant)  # type: ignore[no-any-return]
