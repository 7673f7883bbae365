"""The kernels of Liger. Importing this module imports neither torch nor Liger."""

from __future__ import annotations

import importlib.util
from typing import ClassVar, Literal

from fuseplug import Adapter
from fuseplug_backends.triton import TritonKernel, interpreted
from fuseplug_linear_cross_entropy.kernels import LinearCrossEntropyKernel
from fuseplug_rmsnorm.kernels import RMSNormKernel
from fuseplug_rope.kernels import RoPEKernel
from fuseplug_swiglu.kernels import SwiGLUKernel


class LigerKernel(TritonKernel):
    """The base of all kernels of Liger; name it before the base that has the op."""

    # Kernels that serve more variants, copy less and can be differentiated twice come first, unless the user chooses.
    priority: ClassVar[int] = -10
    # Liger's launches were never traced here, and the compiler of a whole model fuses the originals.
    when_traced: ClassVar[Literal["kernel", "original"]] = "original"

    def unavailable(self, device_type: str) -> str | None:
        """Liger must be importable, and Triton must have what it needs."""
        if importlib.util.find_spec("liger_kernel") is None:
            return 'Liger-Kernel is not installed: pip install "fuseplug-liger[cuda]"'
        return super().unavailable(device_type)


class LigerRMSNormKernel(LigerKernel, RMSNormKernel):
    """RMSNorm by Liger."""

    kernel_id: ClassVar[str] = "liger_fused_rmsnorm"
    function: ClassVar[str] = "fuseplug_liger.rmsnorm:rms_norm"
    # From 32768 rows of at most 256 elements on, a program of Liger takes several rows.
    check_sizes: ClassVar[tuple[int, ...]] = (*TritonKernel.check_sizes, *(() if interpreted() else (1 << 23,)))

    def unsupported(self, adapter: Adapter) -> str | None:
        """Liger normalises whole rows, without a gate."""
        from .declines import of_rmsnorm

        return of_rmsnorm(adapter)


class LigerSwiGLUKernel(LigerKernel, SwiGLUKernel):
    """SwiGLU and GeGLU by Liger."""

    kernel_id: ClassVar[str] = "liger_fused_swiglu"
    function: ClassVar[str] = "fuseplug_liger.swiglu:swiglu"

    def unsupported(self, adapter: Adapter) -> str | None:
        """Liger has two activations, and no clamp."""
        from .declines import of_swiglu

        return of_swiglu(adapter)


class LigerRoPEKernel(LigerKernel, RoPEKernel):
    """RoPE by Liger."""

    kernel_id: ClassVar[str] = "liger_fused_rope"
    function: ClassVar[str] = "fuseplug_liger.rope:rope"
    # This also checks tables with two equal halves, of which Liger may read one.
    recogniser: ClassVar[str] = "fuseplug_liger.tables_alike:match"

    def unsupported(self, adapter: Adapter) -> str | None:
        """Liger rotates q and k together, and one half of a head against the other."""
        from .declines import of_rope

        return of_rope(adapter)


class LigerLinearCrossEntropyKernel(LigerKernel, LinearCrossEntropyKernel):
    """The loss in chunks of tokens by Liger."""

    kernel_id: ClassVar[str] = "liger_fused_linear_cross_entropy"
    function: ClassVar[str] = "fuseplug_liger.linear_cross_entropy:linear_cross_entropy"
