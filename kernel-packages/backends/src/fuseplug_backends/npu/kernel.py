"""The base of kernels for Ascend NPUs, and what they need of the machine."""

from __future__ import annotations

from typing import Any, ClassVar

from fuseplug import BaseKernel

from .chips import DOCUMENTED, undocumented


class NpuKernel(BaseKernel):
    """The base of kernels that call operations of torch_npu. List it before the base that has the op.

    ``class NpuRMSNormKernel(NpuKernel, RMSNormKernel)``

    The kernel's `function` calls the operations as ``torch.ops.npu.npu_rms_norm``, without importing torch_npu. So the
    kernel can be planned for an NPU on a machine without one.

    Attributes:
        ops: The operations of torch_npu that the kernel cannot do without.
    """

    device_types: ClassVar[tuple[str, ...]] = ("npu",)
    ops: ClassVar[tuple[str, ...]] = ()

    def unavailable(self, device_type: str) -> str | None:
        """Return which of `ops` torch_npu lacks, with the remedy; ``None`` if it is loaded and has all of them."""
        del device_type
        import torch

        lacking = [op for op in self.ops if not hasattr(torch.ops.npu, op)]
        if not lacking:
            return None
        series = ".".join(torch.__version__.split(".")[:2])
        return f'torch_npu is not loaded, or has no {", ".join(lacking)}: pip install --upgrade "torch_npu=={series}.*"'

    def caveat(self, device_type: str) -> str | None:
        """Return which of `ops` are documented, but not for the chips of this machine; ``None`` if there are none."""
        if device_type != "npu":
            return None
        import torch

        npu: Any = torch.npu  # type: ignore[attr-defined]
        names = dict.fromkeys(npu.get_device_name(index) for index in range(npu.device_count()))
        caveats = [
            f"{op} is documented for {', '.join(DOCUMENTED[op])}, not for {name}"
            for name in names
            for op in undocumented(name, self.ops)
        ]
        return "; ".join(caveats) or None
