"""The kernels for gated MLPs. Importing this module does not import torch."""

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
    """The gating between the projections by torch_npu, for Ascend NPUs."""

    kernel_id: ClassVar[str] = "npu_fused_swiglu"
    function: ClassVar[str] = "fuseplug_swiglu.backends.npu:swiglu"
    # npu_clipped_swiglu is newer, and only the clamped variants need it. If it is missing, `unsupported` says so.
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
    """Classes that LLaMA-Factory's kernel of this name knows. All are fused, but no code here reads the names."""

    def unsupported(self, adapter: Adapter) -> str | None:
        """Return why torch_npu has no operation for the activation and variant; ``None`` if it has one."""
        from .backends.npu import unsupported
        from .recognise.adapters import GatedAdapter

        if not isinstance(adapter, GatedAdapter):
            return None
        return unsupported(adapter.activation, adapter.form, steep="beta" in dict(adapter.numbers))


class TritonSwiGLUKernel(TritonKernel, SwiGLUKernel):
    """The gating between the projections as one Triton kernel, for GPUs."""

    kernel_id: ClassVar[str] = "triton_fused_swiglu"
    function: ClassVar[str] = "fuseplug_swiglu.backends.triton:swiglu"

    def unsupported(self, adapter: Adapter) -> str | None:
        """Return why not, if the activation's formula is not written in Triton; otherwise ``None``."""
        from fuseplug_backends.activations import ACTIVATIONS

        from .recognise.adapters import GatedAdapter

        formula = ACTIVATIONS[adapter.activation].formula if isinstance(adapter, GatedAdapter) else None
        return None if formula is None or formula in FORMULAS else f"the Triton kernel does not implement {formula}"

    def gains_from(self, use: Use) -> int:
        """Return the size from which a launch saves the GPU more than it costs the host.

        torch starts an activation and a product sooner than one Triton launch. On an H200, for one token: 17 µs instead
        of 34 µs forward, 135 µs instead of 216 µs with the backward. That matters where the host is behind. The launch
        saves the GPU 1.2 µs for each 2²⁰ elements forward, 3.3 µs with the backward. With 2²² elements, neither is more
        than a few hundredths of a layer; with more elements, the GPU is behind.
        """
        return 1 << 22 if _two_operations(use) else 0


class InductorSwiGLUKernel(InductorKernel, SwiGLUKernel):
    """The gating between the projections, compiled by Inductor, for every device that Inductor knows."""

    kernel_id: ClassVar[str] = "inductor_fused_swiglu"
    function: ClassVar[str] = "fuseplug_swiglu.backends.inductor:swiglu"
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 13)

    def gains_from(self, use: Use) -> int:
        """Return a size beyond the caches for an activation and a product; a formula of more steps gains sooner.

        torch's own activations are fast, so compiling saves only a pass over memory. On one x86 core, eager and
        compiled, in ms: silu in bfloat16, forward and backward, takes 1.60 and 1.90 at 2²⁰ elements of the gate, 3.04
        and 2.95 at 2²¹, 30.4 and 14.5 at 12 · 2²⁰; in float32, 3.79 and 3.27 at 2²¹, 9.78 and 6.70 at 2²². The forward
        alone takes 2.28 and 2.14 at 2²² in bfloat16, 7.18 and 6.17 at 12 · 2²⁰. Inductor's erf is slower than torch's:
        gelu in bfloat16 breaks even at 2²². Formulas of several operations: relu² forward takes 0.103 and 0.062 at 2¹⁸,
        silu between clamps 0.24 and 0.18.
        """
        if _two_operations(use):
            return 1 << 21 if use.gradients else 1 << 23
        return 1 << 18


def _two_operations(use: Use) -> bool:
    """Whether the original is one of torch's own activations and a product, and nothing else."""
    from fuseplug_backends.activations import ACTIVATIONS

    from .recognise.adapters import GatedAdapter
    from .reference import VARIANTS

    adapter = use.adapter
    return (
        isinstance(adapter, GatedAdapter) and VARIANTS[adapter.form].simple and ACTIVATIONS[adapter.activation].native
    )
