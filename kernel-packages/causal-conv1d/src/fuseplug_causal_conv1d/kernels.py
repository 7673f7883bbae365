"""The kernels for causal convolutions. Importing this module imports no torch."""

from __future__ import annotations

from typing import ClassVar

from fuseplug import BaseKernel, Use
from fuseplug_backends.inductor import InductorKernel

__all__ = ["CausalConv1dKernel"]


class CausalConv1dKernel(BaseKernel):
    """The base of every kernel for causal convolutions: a subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_causal_conv1d.reference.causal_conv1d`.
    """

    op: ClassVar[str] = "causal_conv1d"
    reference: ClassVar[str] = "fuseplug_causal_conv1d.reference:causal_conv1d"
    recogniser: ClassVar[str] = "fuseplug_causal_conv1d.recognise:match"
    specimens: ClassVar[str] = "fuseplug_causal_conv1d.specimens:specimens"


class InductorCausalConv1dKernel(InductorKernel, CausalConv1dKernel):
    """A causal convolution as Inductor compiles it, for every device Inductor knows."""

    kernel_id: ClassVar[str] = "inductor_fused_causal_conv1d"
    function: ClassVar[str] = "fuseplug_causal_conv1d.backends.inductor:causal_conv1d"

    def gains_from(self, use: Use) -> int:
        """A number of elements of the input. Few are enough, because torch copies the input for its own convolution.

        In µs, the fastest of 20 calls of the kernel and of the model's own function, with 512 channels in float32, on
        one thread of an AMD EPYC with AVX2 that others used, too: forward 54 and 172 at 2¹² elements, 115 and 310 at
        2¹⁴; with the backward 351 and 713, 449 and 951.
        """
        # The original raises an error for packed sequences, however few tokens they have.
        return 0 if getattr(use.adapter, "packed", False) else 1 << 12
