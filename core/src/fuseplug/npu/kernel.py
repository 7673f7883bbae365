"""What a kernel needs of the machine to run on an Ascend NPU."""

from __future__ import annotations

from typing import ClassVar

import importlib_metadata

from ..hookspecs import BaseKernel


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
        """The installed torch_npu must have all of `ops`."""
        del device_type
        lacking = [op for op in self.ops if not has_op(op)]
        if not lacking:
            return None
        return f"torch_npu {installed() or '(not installed)'} has no {', '.join(lacking)}; {remedy()}"


def has_op(name: str) -> bool:
    """Whether torch_npu is loaded and has this operation."""
    import torch

    return hasattr(torch.ops.npu, name)


def installed() -> str | None:
    """The version of torch_npu that is installed."""
    try:
        return importlib_metadata.version("torch_npu")
    except importlib_metadata.PackageNotFoundError:
        return None


def remedy() -> str:
    """How to install the newest torch_npu that goes with the installed torch."""
    series = ".".join(importlib_metadata.version("torch").split(".")[:2])
    return f'pip install --upgrade "torch_npu=={series}.*"'
