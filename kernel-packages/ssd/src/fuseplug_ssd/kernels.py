"""Which kernels for the recurrence of Mamba-2 there are. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar

from fuseplug import BaseKernel, Use

__all__ = ["SSDKernel"]


class SSDKernel(BaseKernel):
    """The base of every kernel for the recurrence of Mamba-2: a subclass names its id, its function and its devices.

    The function has the signature of `fuseplug_ssd.reference.ssd`.
    """

    op: ClassVar[str] = "ssd"
    reference: ClassVar[str] = "fuseplug_ssd.reference:ssd"
    recogniser: ClassVar[str] = "fuseplug_ssd.recognise:match"
    specimens: ClassVar[str] = "fuseplug_ssd.specimens:specimens"
    # Less than a chunk of 64 tokens, and three of them.
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 12)


class InductorSSDKernel(SSDKernel):
    """The recurrence of Mamba-2 in chunks, forward and backward, by operations of PyTorch, for the CPU."""

    kernel_id: ClassVar[str] = "inductor_fused_ssd"
    function: ClassVar[str] = "fuseplug_ssd.backends.inductor:ssd"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def gains_from(self, use: Use) -> int:
        """Elements of x: always."""
        del use
        return 0
