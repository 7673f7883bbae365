"""Which kernels for gated MLPs there are. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar

from fuseplug import Adapter, BaseKernel, Use
from fuseplug_backends.inductor import InductorKernel
from fuseplug_backends.npu import NpuKernel
from fuseplug_backends.triton import FORMULAS, TritonKernel

__all__ = ["SwiGLUKernel"]


class SwiGLUKernel(BaseKernel):
    """The base of every kernel for gated MLPs: a subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_swiglu.reference.swiglu`.
    """

    op: ClassVar[str] = "swiglu"
    reference: ClassVar[str] = "fuseplug_swiglu.reference:swiglu"
    recogniser: ClassVar[str] = "fuseplug_swiglu.recognise:match"
    specimens: ClassVar[str] = "fuseplug_swiglu.specimens:specimens"


class NpuSwiGluKernel(NpuKernel, SwiGLUKernel):
    """What lies between the projections by torch_npu, for Ascend NPUs."""

    kernel_id: ClassVar[str] = "npu_fused_swiglu"
    function: ClassVar[str] = "fuseplug_swiglu.backends.npu:swiglu"
    # npu_clipped_swiglu is younger, and only the clamped variants need it: `unsupported` says so where it is missing.
    ops: ClassVar[tuple[str, ...]] = ("npu_swiglu", "npu_geglu")
    expect_modules: ClassVar[frozenset[str]] = frozenset(
        {
            "Qwen3VLMoeTextMLP",
            "Qwen3VLTextMLP",
            "Qwen3OmniMoeThinkerTextMLP",
            "Qwen3OmniMoeMLP",
            "Qwen3OmniMoeTalkerTextMLP",
            "Qwen3OmniMoeCode2WavMlp",
            "Qwen3NextMLP",
            "Qwen3MoeMLP",
            "Qwen3MLP",
            "Qwen2MLP",
            "Qwen2MoeMLP",
            "Qwen2_5_VLMLP",
            "Qwen2_5OmniMLP",
            "Llama4TextMLP",
            "LlamaMLP",
            "Glm4MLP",
            "Glm4MoeMLP",
            "Glm4vMoeTextMLP",
            "Gemma3MLP",
            "Gemma2MLP",
            "Gemma3nTextMLP",
            "Phi3MLP",
            "DeepseekV2MLP",
            "DeepseekV3MLP",
            "SeedOssMLP",
        }
    )
    """Classes of which LLaMA-Factory's kernel of this name knows. All are fused, and nothing here asks for names."""

    def unsupported(self, adapter: Adapter) -> str | None:
        """Not every activation has an operation, and not every torch_npu has each."""
        from .backends.npu import unsupported
        from .recognise.adapters import GatedAdapter

        if not isinstance(adapter, GatedAdapter):
            return None
        return unsupported(adapter.activation, adapter.form, steep="beta" in dict(adapter.numbers))


class TritonSwiGLUKernel(TritonKernel, SwiGLUKernel):
    """What lies between the projections as one Triton kernel, for GPUs."""

    kernel_id: ClassVar[str] = "triton_fused_swiglu"
    function: ClassVar[str] = "fuseplug_swiglu.backends.triton:swiglu"

    def unsupported(self, adapter: Adapter) -> str | None:
        """Not every activation's formula is written in Triton."""
        from fuseplug_backends.activations import ACTIVATIONS

        from .recognise.adapters import GatedAdapter

        formula = ACTIVATIONS[adapter.activation].formula if isinstance(adapter, GatedAdapter) else None
        return None if formula is None or formula in FORMULAS else f"the Triton program has no {formula}"

    def gains_from(self, use: Use) -> int:
        """An activation and a product of torch's own are started sooner than one launch of Triton's.

        On an H200, for one token: 17 µs for 34 forward, 135 for 216 with the backward. That counts where the host is
        behind. The launch saves the GPU 1.2 µs for each 2²⁰ elements forward, 3.3 with the backward. With 2²² elements
        neither is more than a few hundredths of a layer, and with more the GPU is behind.
        """
        return 1 << 22 if _two_operations(use) else 0


class InductorSwiGLUKernel(InductorKernel, SwiGLUKernel):
    """What lies between the projections as Inductor compiles it, for every device Inductor knows."""

    kernel_id: ClassVar[str] = "inductor_fused_swiglu"
    function: ClassVar[str] = "fuseplug_swiglu.backends.inductor:swiglu"
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 13)

    def gains_from(self, use: Use) -> int:
        """An activation and a product gain only what does not fit into a cache; a formula of more steps gains sooner.

        torch's own activations are fast, so what is saved is a pass over memory. On one x86 core, eager and compiled,
        in ms: silu in bfloat16, forward and backward, 1.60 and 1.90 at 2²⁰ elements of the gate, 3.04 and 2.95 at 2²¹,
        30.4 and 14.5 at 12 · 2²⁰; in float32 3.79 and 3.27 at 2²¹, 9.78 and 6.70 at 2²². Forward alone 2.28 and 2.14
        at 2²² in bfloat16, 7.18 and 6.17 at 12 · 2²⁰. Inductor's erf is slower than torch's: gelu in bfloat16 breaks
        even at 2²². Of several operations: relu² forward 0.103 and 0.062 at 2¹⁸, silu between clamps 0.24 and 0.18.
        """
        if _two_operations(use):
            return 1 << 21 if use.gradients else 1 << 23
        return 1 << 18


def _two_operations(use: Use) -> bool:
    """Whether the original is an activation of torch's own and a product, and nothing else."""
    from fuseplug_backends.activations import ACTIVATIONS

    from .recognise.adapters import GatedAdapter
    from .reference import VARIANTS

    adapter = use.adapter
    return (
        isinstance(adapter, GatedAdapter) and VARIANTS[adapter.form].simple and ACTIVATIONS[adapter.activation].native
    )
