"""The kernels for the recurrence of Mamba-2. Importing this module does not import torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from fuseplug import BaseKernel, Use
from fuseplug_backends.npu import NpuKernel

__all__ = ["SSDKernel"]


class SSDKernel(BaseKernel):
    """The base class of kernels for the recurrence of Mamba-2. A subclass names its id, its function and its devices.

    The function has the signature of `fuseplug_ssd.reference.ssd`.
    """

    op: ClassVar[str] = "ssd"
    reference: ClassVar[str] = "fuseplug_ssd.reference:ssd"
    recogniser: ClassVar[str] = "fuseplug_ssd.recognise:match"
    specimens: ClassVar[str] = "fuseplug_ssd.specimens:specimens"
    # When traced, the original has a few operations for each chunk, but the reference has some for each token.
    when_traced: ClassVar[Literal["kernel", "original"]] = "original"
    # At these sizes, examples have less than one chunk of 64 tokens, and three chunks.
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 12)


class NpuSSDKernel(NpuKernel, SSDKernel):
    """The recurrence of Mamba-2 in chunks, by operations of torch, for Ascend NPUs."""

    kernel_id: ClassVar[str] = "npu_fused_ssd"
    function: ClassVar[str] = "fuseplug_ssd.backends.npu:ssd"


class InductorSSDKernel(SSDKernel):
    """The recurrence of Mamba-2 in chunks, forward and backward, by operations of PyTorch, for the CPU."""

    kernel_id: ClassVar[str] = "inductor_fused_ssd"
    function: ClassVar[str] = "fuseplug_ssd.backends.inductor:ssd"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def gains_from(self, use: Use) -> int:
        """For a scan 0 elements of x. A decoding step has its own limit, in elements of the state.

        With fewer elements, the work around the operations takes as long as the operations save. Times are in µs: the
        lower quartile of 40 steps in a fused and in an unfused module, for heads of 64 × 128 states in float32 on one
        thread of an AMD EPYC with AVX512 that others used, too. 151 and 110 for two heads, 157 and 171 for 4, 179 and
        292 for 8 (2¹⁶ elements), 271 and 735 for 24. In bfloat16: 260 and 355 for 8, 431 and 5579 for 24, the number of
        heads of the smallest Mamba-2.
        """
        return 1 << 16 if getattr(use.adapter, "is_step", False) else 0
