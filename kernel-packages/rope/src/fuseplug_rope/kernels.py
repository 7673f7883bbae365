"""The RoPE kernels. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar

from fuseplug import BaseKernel, Use
from fuseplug_backends.inductor import InductorKernel
from fuseplug_backends.npu import NpuKernel
from fuseplug_backends.triton import TritonKernel

__all__ = ["RoPEKernel"]


class RoPEKernel(BaseKernel):
    """The base of every RoPE kernel: a subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_rope.reference.rope`.
    """

    op: ClassVar[str] = "rope"
    reference: ClassVar[str] = "fuseplug_rope.reference:rope"
    recogniser: ClassVar[str] = "fuseplug_rope.recognise:match"
    specimens: ClassVar[str] = "fuseplug_rope.specimens:specimens"


class NpuRoPEKernel(NpuKernel, RoPEKernel):
    """RoPE by torch_npu's rotary operation, in every variant."""

    kernel_id: ClassVar[str] = "npu_fused_rope"
    function: ClassVar[str] = "fuseplug_rope.backends.npu:rope"
    ops: ClassVar[tuple[str, ...]] = ("npu_rotary_mul",)


class TritonRoPEKernel(TritonKernel, RoPEKernel):
    """RoPE by one launch for q and k, forward and backward, in every variant."""

    kernel_id: ClassVar[str] = "triton_fused_rope"
    function: ClassVar[str] = "fuseplug_rope.backends.triton:rope"


class InductorRoPEKernel(InductorKernel, RoPEKernel):
    """RoPE as Inductor compiles it, for every device Inductor knows."""

    kernel_id: ClassVar[str] = "inductor_fused_rope"
    function: ClassVar[str] = "fuseplug_rope.backends.inductor:rope"

    def gains_from(self, use: Use) -> int:
        """A number of elements of q: few operations are saved, so only passes over memory outside the caches count.

        Measured as for the norms, with only rotations fused, by thousands of elements of q. bfloat16 forward, 262: 0.99
        and 1.00, 524: 0.99 and 1.01, 1049: 1.01 and 1.01; with the backward, 262: 0.995 and 1.00, 524: 1.00 and 1.02.
        float32 forward, 262: 1.00 and 1.01; with the backward, 262: 0.98 and 1.01, 524: 1.00 and 1.02.
        """
        return 1 << 19 if use.dtype.itemsize == 2 else 1 << 18
