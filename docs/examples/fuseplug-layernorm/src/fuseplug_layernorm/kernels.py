"""Which kernels there are. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar

from fuseplug import BaseKernel, Use
from fuseplug_backends.inductor import InductorKernel


class LayernormKernel(BaseKernel):
    """The base of every kernel for layer_norm: a subclass names its id, its function and its device types."""

    op: ClassVar[str] = "layer_norm"
    reference: ClassVar[str] = "fuseplug_layernorm.reference:layer_norm"
    recogniser: ClassVar[str] = "fuseplug_layernorm.recognise:match"
    specimens: ClassVar[str] = "fuseplug_layernorm.specimens:specimens"


class InductorLayernormKernel(InductorKernel, LayernormKernel):
    """For every device that Inductor compiles for, CPUs included."""

    kernel_id: ClassVar[str] = "inductor_fused_layernorm"
    function: ClassVar[str] = "fuseplug_layernorm.backend:layer_norm"

    def gains_from(self, use: Use) -> int:
        """Elements from which on it is faster; measure them: ``fuseplug bench MODEL --ops``."""
        del use
        return 1 << 16  # it compiles nothing for fewer
