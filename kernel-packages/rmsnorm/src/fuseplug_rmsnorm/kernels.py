"""The RMSNorm kernels. Importing this module does not import torch."""

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
    """RMSNorm compiled by Inductor, for every device that Inductor knows."""

    kernel_id: ClassVar[str] = "inductor_fused_rmsnorm"
    function: ClassVar[str] = "fuseplug_rmsnorm.backends.inductor:rms_norm"
    # Over more than 4096 rows, Inductor sums the weight's gradient in another way. The q and k of most calls have more
    # rows, and so has the second size for heads of 128.
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, (1 << 19) + 1)

    def gains_from(self, use: Use) -> int:
        """Return the size from which the passes over memory that a compiled call saves outweigh its fixed cost.

        A compiled call costs as much as starting eager's operations, and more in a model.

        Measured in whole models, where the data of a call are not in the caches: 2 layers of Qwen3-MoE and of Qwen3,
        with only their norms fused, on two cores of an Intel Xeon with AVX-512. The figures are multiples of eager's
        speed, by thousands of elements of the smallest norm. In bfloat16, forward: 33: 0.97; 66: 1.02 and 1.00; 131:
        1.01 and 1.01. With the backward: 66: 0.99 and 1.00; 131: 1.02 and 1.01. In float32, forward: 66: 0.99 and 0.99;
        131: 1.00 and 1.00; 262: 1.01 and 1.00. With the backward: 131: 1.00; 262: 1.00 and 1.02. Two identical models
        differ by 0.01.
        """
        if use.dtype.itemsize == 2:
            return 1 << 17 if use.gradients else 1 << 16
        return 1 << 18
