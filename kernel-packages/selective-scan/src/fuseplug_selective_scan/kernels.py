"""The kernels for the selective scan. Importing this module does not import torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from fuseplug import BaseKernel, Use

__all__ = ["SelectiveScanKernel"]


class SelectiveScanKernel(BaseKernel):
    """The base class of kernels for the selective scan. A subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_selective_scan.reference.selective_scan`.
    """

    op: ClassVar[str] = "selective_scan"
    reference: ClassVar[str] = "fuseplug_selective_scan.reference:selective_scan"
    recogniser: ClassVar[str] = "fuseplug_selective_scan.recognise:match"
    specimens: ClassVar[str] = "fuseplug_selective_scan.specimens:specimens"
    # When traced, the original has a few operations for each chunk, but the reference has some for each token.
    when_traced: ClassVar[Literal["kernel", "original"]] = "original"
    # At these sizes, examples have two and three chunks of tokens.
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 11)


class InductorSelectiveScanKernel(SelectiveScanKernel):
    """The selective scan, forward and backward in linear time, by operations of PyTorch, for the CPU."""

    kernel_id: ClassVar[str] = "inductor_fused_selective_scan"
    function: ClassVar[str] = "fuseplug_selective_scan.backends.inductor:selective_scan"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def gains_from(self, use: Use) -> int:
        """For a scan 0 elements of x, because calls of few tokens go to the original anyway, however large they are.

        A decoding step has its own limit, in elements of the state. With fewer elements, the work around the operations
        takes as long as the operations save.

        Times are in ms: the fastest of 20 calls, by the kernel and by transformers' own function, for 8 tokens in
        float32 on one thread of an AMD EPYC with AVX2 that others used, too. 256 channels of 16 states: forward 0.56
        and 0.76, with the backward 2.1 and 3.7. 2048 channels: 1.8 and 2.8, 10.5 and 23.9. For 4 tokens of 256
        channels, the forward takes 0.55 and 0.31.

        Steps with 16 states, also in a fused and in an unfused module: 0.21 and 0.18 at 2¹⁶ elements in float32, 0.38
        and 0.44 at 2¹⁷ (two sequences; for one sequence, 0.32 and 0.32), 0.66 and 0.76 at 2¹⁸, 1.2 and 5.2 at 2¹⁹. In
        bfloat16: 0.24 and 0.26, 0.39 and 0.42, 0.66 and 0.77, 1.2 and 1.6.
        """
        return 1 << 18 if getattr(use.adapter, "is_step", False) else 0
