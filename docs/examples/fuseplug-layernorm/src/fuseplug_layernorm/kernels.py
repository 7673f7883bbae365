"""The kernels. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar

from fuseplug import BaseKernel, Use
from fuseplug_backends.inductor import InductorKernel


class LayernormKernel(BaseKernel):
    """The base of every kernel for layer_norm. A subclass names its id, function and device types."""

    op: ClassVar[str] = "layer_norm"
    reference: ClassVar[str] = "fuseplug_layernorm.reference:layer_norm"
    recogniser: ClassVar[str] = "fuseplug_layernorm.recognise:match"
    specimens: ClassVar[str] = "fuseplug_layernorm.specimens:specimens"


class InductorLayernormKernel(InductorKernel, LayernormKernel):
    """The kernel for every device that Inductor compiles for, CPUs included."""

    kernel_id: ClassVar[str] = "inductor_fused_layernorm"
    function: ClassVar[str] = "fuseplug_layernorm.backend:layer_norm"

    def gains_from(self, use: Use) -> int:
        """The number of elements from which on the kernel is faster: ``fuseplug bench MODEL --ops`` measures it."""
        del use
        return 1 << 16  # for fewer elements, nothing is compiled
