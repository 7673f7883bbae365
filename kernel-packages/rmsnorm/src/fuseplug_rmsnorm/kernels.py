"""Which RMSNorm kernels there are. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from fuseplug import BaseKernel, Proposal, Rejection, Site
from fuseplug.inductor import InductorKernel
from fuseplug.npu import NpuKernel
from fuseplug.triton import TritonKernel


class RMSNormKernel(BaseKernel):
    """The base of every RMSNorm kernel: a subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_rmsnorm.reference.rms_norm`.
    """

    op: ClassVar[str] = "rmsnorm"
    reference: ClassVar[str] = "fuseplug_rmsnorm.reference:rms_norm"
    specimens: ClassVar[str] = "fuseplug_rmsnorm.specimens:specimens"

    def match(self, site: Site) -> Iterable[Proposal] | Rejection | None:
        """Recognise an RMSNorm by its structure, in every variant of the reference."""
        from .recognise import match

        return match(site)


class NpuRMSNormKernel(NpuKernel, RMSNormKernel):
    """RMSNorm by torch_npu, for Ascend NPUs."""

    kernel_id: ClassVar[str] = "npu_fused_rmsnorm"
    function: ClassVar[str] = "fuseplug_rmsnorm.backends.npu:rms_norm"
    ops: ClassVar[tuple[str, ...]] = ("npu_rms_norm",)


class TritonRMSNormKernel(TritonKernel, RMSNormKernel):
    """RMSNorm by Triton, for GPUs."""

    kernel_id: ClassVar[str] = "triton_fused_rmsnorm"
    function: ClassVar[str] = "fuseplug_rmsnorm.backends.triton:rms_norm"


class InductorRMSNormKernel(InductorKernel, RMSNormKernel):
    """RMSNorm as Inductor compiles it, for every device Inductor knows."""

    kernel_id: ClassVar[str] = "inductor_fused_rmsnorm"
    function: ClassVar[str] = "fuseplug_rmsnorm.backends.inductor:rms_norm"
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 10, 1 << 19)  # below and above what is worth a compiled call
