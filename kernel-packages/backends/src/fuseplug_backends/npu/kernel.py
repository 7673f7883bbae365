"""What a kernel needs of the machine to run on an Ascend NPU."""

from __future__ import annotations

from typing import Any, ClassVar

import importlib_metadata

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
        """The installed torch_npu must have all of `ops`."""
        del device_type
        lacking = [op for op in self.ops if not has_op(op)]
        if not lacking:
            return None
        version = version_of("torch_npu") or "(not installed)"
        return f"torch_npu {version} has no {', '.join(lacking)}: {how_to_install(version_of('torch'))}"

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


def has_op(name: str) -> bool:
    """Whether torch_npu is loaded and has this operation."""
    import torch

    return hasattr(torch.ops.npu, name)


def version_of(distribution: str) -> str | None:
    """The version of *distribution* that is installed."""
    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def how_to_install(torch_version: str | None) -> str:
    """The command that installs the newest torch_npu for this torch."""
    series = ".".join(torch_version.split(".")[:2]) + ".*" if torch_version else ""
    return f'pip install --upgrade "torch_npu=={series}"' if series else "pip install torch torch_npu"
