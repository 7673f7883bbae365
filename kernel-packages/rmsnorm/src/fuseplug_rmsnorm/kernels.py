"""Which RMSNorm kernels there are. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar

from fuseplug import BaseKernel, Use
from fuseplug_backends.inductor import InductorKernel
from fuseplug_backends.npu import NpuKernel
from fuseplug_backends.triton import TritonKernel

__all__ = ["RMSNormKernel"]


class RMSNormKernel(BaseKernel):
    """The base of every RMSNorm kernel: a subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_rmsnorm.reference.rms_norm`.
    """

    op: ClassVar[str] = "rmsnorm"
    reference: ClassVar[str] = "fuseplug_rmsnorm.reference:rms_norm"
    recogniser: ClassVar[str] = "fuseplug_rmsnorm.recognise:match"
    specimens: ClassVar[str] = "fuseplug_rmsnorm.specimens:specimens"


class NpuRMSNormKernel(NpuKernel, RMSNormKernel):
    """RMSNorm by torch_npu, for Ascend NPUs."""

    kernel_id: ClassVar[str] = "npu_fused_rmsnorm"
    function: ClassVar[str] = "fuseplug_rmsnorm.backends.npu:rms_norm"
    ops: ClassVar[tuple[str, ...]] = ("npu_rms_norm",)


class TritonRMSNormKernel(TritonKernel, RMSNormKernel):
    """RMSNorm by Triton, for GPUs."""

    kernel_id: ClassVar[str] = "triton_fused_rmsnorm"
    function: ClassVar[str] = "fuseplug_rmsnorm.backends.triton:rms_norm"


class InductorRMSNormKernel(InductorKernel, RMSNormKernel):
    """RMSNorm as Inductor compiles it, for every device Inductor knows."""

    kernel_id: ClassVar[str] = "inductor_fused_rmsnorm"
    function: ClassVar[str] = "fuseplug_rmsnorm.backends.inductor:rms_norm"
    # Inductor sums the weight's gradient another way over more than 4096 rows. The q and k of most calls have more; of
    # heads of 128 so has this.
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, (1 << 19) + 1)

    def gains_from(self, use: Use) -> int:
        """A compiled call costs what eager's operations cost to start, more in a model, and saves passes over memory.

        Measured in whole models, where what a call needs is out of the caches: 2 layers of Qwen3-MoE and of Qwen3 on
        two cores of an Intel Xeon with AVX-512, whose norms alone are fused, as multiples of eager's speed, by
        thousands of elements of the smallest norm. In bfloat16: forward 33 0.97, 66 1.02 and 1.00, 131 1.01 and 1.01;
        with the backward 66 0.99 and 1.00, 131 1.02 and 1.01. In float32: forward 66 0.99 and 0.99, 131 1.00 and 1.00,
        262 1.01 and 1.00; with the backward 131 1.00, 262 1.00 and 1.02. Two identical models differ by 0.01.
        """
        if use.dtype.itemsize == 2:
            return 1 << 17 if use.gradients else 1 << 16
        return 1 << 18
