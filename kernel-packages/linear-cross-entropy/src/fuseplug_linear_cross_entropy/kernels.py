"""The kernels for the linear cross-entropy. Importing this module imports no torch."""

from __future__ import annotations

from typing import ClassVar

from fuseplug import BaseKernel, Use
from fuseplug_backends.inductor import InductorKernel
from fuseplug_backends.npu import NpuKernel
from fuseplug_backends.triton import TritonKernel

__all__ = ["LinearCrossEntropyKernel"]


class LinearCrossEntropyKernel(BaseKernel):
    """The base of every kernel for the linear cross-entropy: a subclass names its id, function and device types.

    The function has the signature of `fuseplug_linear_cross_entropy.reference.linear_cross_entropy`.
    """

    op: ClassVar[str] = "linear_cross_entropy"
    reference: ClassVar[str] = "fuseplug_linear_cross_entropy.reference:linear_cross_entropy"
    recogniser: ClassVar[str] = "fuseplug_linear_cross_entropy.recognise:match"
    specimens: ClassVar[str] = "fuseplug_linear_cross_entropy.specimens:specimens"
    # Sixteen rows of a small vocabulary, and 512 rows of one with several tiles: more than 2²² logits.
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 14)


class NpuLinearCrossEntropyKernel(NpuKernel, LinearCrossEntropyKernel):
    """The loss in chunks of tokens, by operations of torch, for Ascend NPUs."""

    kernel_id: ClassVar[str] = "npu_fused_linear_cross_entropy"
    function: ClassVar[str] = "fuseplug_linear_cross_entropy.backends.npu:linear_cross_entropy"


class TritonLinearCrossEntropyKernel(TritonKernel, LinearCrossEntropyKernel):
    """The loss in chunks of tokens, with matmuls by cuBLAS and the rest by Triton, for GPUs."""

    kernel_id: ClassVar[str] = "triton_fused_linear_cross_entropy"
    function: ClassVar[str] = "fuseplug_linear_cross_entropy.backends.triton:linear_cross_entropy"


class InductorLinearCrossEntropyKernel(InductorKernel, LinearCrossEntropyKernel):
    """The loss in chunks of tokens, with the steps between the matmuls compiled by Inductor, for the CPU."""

    kernel_id: ClassVar[str] = "inductor_fused_linear_cross_entropy"
    function: ClassVar[str] = "fuseplug_linear_cross_entropy.backends.inductor:linear_cross_entropy"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def gains_from(self, use: Use) -> int:
        """A number of logits: fewer fit into a cache, where PyTorch is as fast, and leave no memory to save.

        In ms for the reference and this kernel, forward and backward, on one x86 core, with hidden 256: 48 and 52 at
        2²² logits in bfloat16, 90 and 99 in float32; 103 and 98, 173 and 178 at 2²³; at 2²⁴, with hidden 512, 337 and
        286, 737 and 720. On two cores with AVX2, where half precision is slow: 47 and 9 at 2¹⁶, 2026 and 50 at 2²⁰.
        """
        from fuseplug_backends.products import is_slow

        return 1 << 16 if is_slow(use.dtype, use.device_type) else 1 << 23
