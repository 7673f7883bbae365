"""The mixture-of-experts kernels. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar

from fuseplug import Adapter, BaseKernel, Use
from fuseplug_backends.inductor import InductorKernel
from fuseplug_backends.npu import NpuKernel
from fuseplug_backends.triton import FORMULAS, TritonKernel

__all__ = ["MoEKernel"]

STACKED_GAINS_FROM = 512
"""The number of tokens from which on Inductor's kernel beats ``grouped_mm``: see `InductorMoEKernel.gains_from`."""


class MoEKernel(BaseKernel):
    """The base of every mixture-of-experts kernel: a subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_moe.reference.moe`.
    """

    op: ClassVar[str] = "moe"
    reference: ClassVar[str] = "fuseplug_moe.reference:moe"
    recogniser: ClassVar[str] = "fuseplug_moe.recognise:match"
    specimens: ClassVar[str] = "fuseplug_moe.specimens:specimens"


class InductorMoEKernel(InductorKernel, MoEKernel):
    """A mixture of experts, compiled by Inductor between the matrix products, for every device Inductor knows."""

    kernel_id: ClassVar[str] = "inductor_fused_moe"
    function: ClassVar[str] = "fuseplug_moe.backends.inductor:moe"
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 18)

    def gains_from(self, use: Use) -> int:
        """A number of tokens: with few rows for each expert, the kernel gains nothing over ``grouped_mm``.

        Stacked experts call ``grouped_mm``. The kernel's speed on two x86 cores, as a multiple of that of
        ``grouped_mm``, with 8 experts and with 64. At 128 tokens: 0.93 and 0.94 forward in bfloat16, 1.00 and 1.06 with
        the backward; in float32 1.58 and 0.78, 1.28 and 0.93. At 512 tokens: 1.03 and 1.06, 1.09 and 1.15; 1.82 and
        1.39, 1.63 and 1.29. Where half precision is slow, on two cores with AVX2, at 16 tokens: 0.96 and 0.79 forward,
        3.29 and 1.09 with the backward; at 128 tokens: 2.16 and 1.00, 10.0 and 2.60.

        A loop over a list of experts is slower than the kernel from 16 tokens on. An original that computes all experts
        for each token is always slower.
        """
        from fuseplug_backends.products import is_slow

        from .recognise.listed_blocks import BlockAdapter, SeamAdapter
        from .recognise.stacked_experts import StackedAdapter

        if isinstance(use.adapter, StackedAdapter):
            slow = is_slow(use.dtype, use.device_type)
            return (16 if use.gradients else 128) if slow else STACKED_GAINS_FROM
        return 16 if isinstance(use.adapter, (BlockAdapter, SeamAdapter)) else 0

    def gains_until(self, use: Use) -> int:
        """A number of tokens: a single decoded one needs no sorting by expert, which ``grouped_mm`` does first.

        The kernel's speed on two x86 cores, as a multiple of that of ``grouped_mm``, in bfloat16 and float32. 32
        experts of 512 × 384: 1.41 and 1.54; 64 of 256 × 512: 1.27 and 1.48; 128 of 2048 × 768: 1.14 and 1.11; 8 of
        1024 × 3584: 1.08 and 1.07. With two tokens: 1.19 and 1.11, 1.02 and 1.12, 1.01 and 1.04, 0.88 and 0.84.
        """
        from .recognise.stacked_experts import StackedAdapter

        decodes = isinstance(use.adapter, StackedAdapter) and use.device_type == "cpu" and not use.gradients
        return 1 if decodes else 0


class NpuFusedMoEKernel(NpuKernel, MoEKernel):
    """A mixture of experts in grouped matmuls of torch_npu, for Ascend NPUs.

    It also calls ``npu_clipped_swiglu`` if torch_npu is new enough to have it.
    """

    kernel_id: ClassVar[str] = "npu_fused_moe"
    function: ClassVar[str] = "fuseplug_moe.backends.npu:moe"
    ops: ClassVar[tuple[str, ...]] = (
        "npu_moe_token_permute",
        "npu_moe_token_unpermute",
        "npu_grouped_matmul",
        "npu_swiglu",
        "npu_geglu",
    )


class TritonMoEKernel(TritonKernel, MoEKernel):
    """A mixture of experts in Triton, which gathers rows and applies the gate inside the matrix products."""

    kernel_id: ClassVar[str] = "triton_fused_moe"
    function: ClassVar[str] = "fuseplug_moe.backends.triton:moe"
    # The lowest tiles and the highest; in the interpreter, where the highest take minutes, only the lowest.
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 15)[: len(TritonKernel.check_sizes)]

    def unsupported(self, adapter: Adapter) -> str | None:
        """Decline activations whose formula is not written in Triton. A module's own activation is called as it is."""
        from .reference import GATES

        gate = GATES.get(getattr(adapter, "activation", ""))
        return None if gate is None or gate.row.formula in FORMULAS else f"the Triton program has no {gate.row.formula}"
