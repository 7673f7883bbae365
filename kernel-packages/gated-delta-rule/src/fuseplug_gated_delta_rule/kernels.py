"""Which kernels for the gated delta rule there are. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar

from fuseplug import BaseKernel

__all__ = ["GatedDeltaRuleKernel"]


class GatedDeltaRuleKernel(BaseKernel):
    """The base of every kernel for the gated delta rule: a subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_gated_delta_rule.reference.gated_delta_rule`.
    """

    op: ClassVar[str] = "gated_delta_rule"
    reference: ClassVar[str] = "fuseplug_gated_delta_rule.reference:gated_delta_rule"
    recogniser: ClassVar[str] = "fuseplug_gated_delta_rule.recognise:match"
    specimens: ClassVar[str] = "fuseplug_gated_delta_rule.specimens:specimens"
    # A part of one chunk, and several segments of chunks.
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 14)


class InductorGatedDeltaRuleKernel(GatedDeltaRuleKernel):
    """The gated delta rule in chunks, by operations of PyTorch, for the CPU."""

    kernel_id: ClassVar[str] = "inductor_fused_gated_delta_rule"
    function: ClassVar[str] = "fuseplug_gated_delta_rule.backends.inductor:gated_delta_rule"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
