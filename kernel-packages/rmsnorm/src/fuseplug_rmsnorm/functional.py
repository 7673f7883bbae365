"""RMSNorm for tensors on whatever device: by the first kernel here that can run there."""

from __future__ import annotations

from torch import Tensor

from fuseplug.functional import module_for

from . import reference
from .kernels import InductorRMSNormKernel, NpuRMSNormKernel, TritonRMSNormKernel

_KERNELS = (NpuRMSNormKernel, TritonRMSNormKernel, InductorRMSNormKernel)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    variant: str = "llama",
    gate: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor:
    """`fuseplug_rmsnorm.reference.rms_norm`, fused: the same arguments, result up to rounding, and errors.

    On an NPU it is `fuseplug_rmsnorm.backends.npu.rms_norm`; on a GPU `fuseplug_rmsnorm.backends.triton.rms_norm`; elsewhere, or where
    these cannot run, `fuseplug_rmsnorm.backends.inductor.rms_norm`; and without a compiler for that the reference.
    """
    compute = module_for(x.device.type, _KERNELS).rms_norm
    return compute(x, weight, eps, variant=variant, gate=gate, group_size=group_size)  # type: ignore[no-any-return]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    """`fuseplug_rmsnorm.reference.add_rms_norm`, fused: what stands before each block of a transformer.

    On GPUs it is one launch, and on NPUs for the variant ``"llama"``. Elsewhere it is the addition and `rms_norm`.
    """
    module = module_for(x.device.type, _KERNELS)
    if hasattr(module, "add_rms_norm"):
        return module.add_rms_norm(x, residual, weight, eps, variant=variant)  # type: ignore[no-any-return]
    return reference.add_rms_norm(x, residual, weight, eps, variant=variant, norm=module.rms_norm)
