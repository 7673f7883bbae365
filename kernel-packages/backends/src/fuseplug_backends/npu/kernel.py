"""What a kernel needs of the machine to run on an Ascend NPU."""

from __future__ import annotations

from typing import Any, ClassVar

from fuseplug import BaseKernel

from .chips import DOCUMENTED, undocumented


class NpuKernel(BaseKernel):
    """The base of a kernel that calls operations of torch_npu; name it before the base that has the op.

    ``class NpuRMSNormKernel(NpuKernel, RMSNormKernel)``

    Its `function` calls them as ``torch.ops.npu.npu_rms_norm``, without importing torch_npu: so it can be planned for
    an NPU on a machine that has none.

    Attributes:
        ops: Every operation of torch_npu that it calls.
    """

    device_types: ClassVar[tuple[str, ...]] = ("npu",)
    ops: ClassVar[tuple[str, ...]] = ()

    def unavailable(self, device_type: str) -> str | None:
        """The torch_npu that is loaded must have all of `ops`."""
        del device_type
        import torch

        lacking = [op for op in self.ops if not hasattr(torch.ops.npu, op)]
        if not lacking:
            return None
        series = ".".join(torch.__version__.split(".")[:2])
        return f'torch_npu is not loaded, or has no {", ".join(lacking)}: pip install --upgrade "torch_npu=={series}.*"'

    def caveat(self, device_type: str) -> str | None:
        """Each of `ops` should be documented for the chips that are here."""
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
