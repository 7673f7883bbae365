"""Which kernels for gated MLPs there are. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from fuseplug import Adapter, BaseKernel, Proposal, Rejection, Site
from fuseplug.inductor import InductorKernel
from fuseplug.npu import NpuKernel
from fuseplug.triton import FORMULAS, TritonKernel


class SwiGLUKernel(BaseKernel):
    """The base of every kernel for gated MLPs: a subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_swiglu.reference.swiglu`.
    """

    op: ClassVar[str] = "swiglu"
    reference: ClassVar[str] = "fuseplug_swiglu.reference:swiglu"
    specimens: ClassVar[str] = "fuseplug_swiglu.specimens:specimens"

    def match(self, site: Site) -> Iterable[Proposal] | Rejection | None:
        """Recognise a gated MLP by its structure, in every variant of the reference."""
        from .recognise import match

        return match(site)


class NpuSwiGluKernel(NpuKernel, SwiGLUKernel):
    """What lies between the projections by torch_npu, for Ascend NPUs."""

    kernel_id: ClassVar[str] = "npu_fused_swiglu"
    function: ClassVar[str] = "fuseplug_swiglu.backends.npu:swiglu"
    # npu_clipped_swiglu is younger, and only the clamped variants need it: `unsupported` says so where it is missing.
    ops: ClassVar[tuple[str, ...]] = ("npu_swiglu", "npu_geglu")

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
        from fuseplug.activations import ACTIVATIONS

        from .recognise.adapters import GatedAdapter

        formula = ACTIVATIONS[adapter.activation].formula if isinstance(adapter, GatedAdapter) else None
        return None if formula is None or formula in FORMULAS else f"the Triton program has no {formula}"


class InductorSwiGLUKernel(InductorKernel, SwiGLUKernel):
    """What lies between the projections as Inductor compiles it, for every device Inductor knows."""

    kernel_id: ClassVar[str] = "inductor_fused_swiglu"
    function: ClassVar[str] = "fuseplug_swiglu.backends.inductor:swiglu"
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 9, 1 << 13)  # below and above what is worth a compiled call
