"""The kernels for the gated delta rule. Importing this module imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from fuseplug import BaseKernel, Use
from fuseplug_backends.npu import NpuKernel

__all__ = ["GatedDeltaRuleKernel"]


class GatedDeltaRuleKernel(BaseKernel):
    """The base of every kernel for the gated delta rule: a subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_gated_delta_rule.reference.gated_delta_rule`.
    """

    op: ClassVar[str] = "gated_delta_rule"
    reference: ClassVar[str] = "fuseplug_gated_delta_rule.reference:gated_delta_rule"
    recogniser: ClassVar[str] = "fuseplug_gated_delta_rule.recognise:match"
    specimens: ClassVar[str] = "fuseplug_gated_delta_rule.specimens:specimens"
    # The original takes a few operations for each chunk, a traced formula some for each token.
    when_traced: ClassVar[Literal["kernel", "original"]] = "original"
    # A part of one chunk, and several segments of chunks.
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 14)


class NpuGatedDeltaRuleKernel(NpuKernel, GatedDeltaRuleKernel):
    """The gated delta rule in chunks, by operations of torch, for Ascend NPUs."""

    kernel_id: ClassVar[str] = "npu_fused_gated_delta_rule"
    function: ClassVar[str] = "fuseplug_gated_delta_rule.backends.npu:gated_delta_rule"


class InductorGatedDeltaRuleKernel(GatedDeltaRuleKernel):
    """The gated delta rule in chunks, by operations of PyTorch, for the CPU."""

    kernel_id: ClassVar[str] = "inductor_fused_gated_delta_rule"
    function: ClassVar[str] = "fuseplug_gated_delta_rule.backends.inductor:gated_delta_rule"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def gains_from(self, use: Use) -> int:
        """A number of elements of q: any if channels have decays; if only heads have, more than one or two chunks.

        In ms, the fastest of seven to fifteen calls of the kernel and of transformers' own functions, in float32, on
        one thread of an AMD EPYC with AVX2 that others used, too. Channels, forward: 1.3 and 3.7 at 192 elements, 1.8
        and 7.6 at 2¹¹. Heads, forward: 1.7 and 1.3 at 2¹⁴, 5.0 and 5.0 at 2¹⁶, 13 and 16 at 2¹⁷; with the backward 19
        and 21, 42 and 30 (64 tokens; for 512, 52 and 66), and 85 and 100 at 2¹⁸. A step of decoding: 0.24 and 0.22 at
        2⁹, 0.40 and 0.50 at 2¹¹, 2.6 and 4.8 at 2¹².
        """
        if getattr(use.adapter, "is_step", False) and not use.gradients:
            return 1 << 11
        # The original raises an error for packed sequences, however few tokens they have.
        if use.adapter.variant == "channel" or getattr(use.adapter, "packed", False):
            return 0
        return 1 << 18 if use.gradients else 1 << 16
