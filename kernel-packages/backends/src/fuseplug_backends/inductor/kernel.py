"""What a kernel needs of the machine for Inductor to compile it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from fuseplug import BaseKernel


class InductorKernel(BaseKernel):
    """The base of a kernel that Inductor compiles; name it before the base that has the op.

    ``class InductorRMSNormKernel(InductorKernel, RMSNormKernel)``

    A call that is traced is the original's: whatever compiles the model fuses it with what is around it.
    """

    when_traced: ClassVar[Literal["kernel", "original"]] = "original"
    rehearsal: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"cpu": "fuseplug_backends.inductor.rehearsal:side_by_side"}
    )

    def unavailable(self, device_type: str) -> str | None:
        """Inductor compiles C++ for the CPU, so there it needs a compiler; for an NPU, Ascend's own Triton."""
        if device_type == "cpu" and cpp_compiler(os.environ) is None:
            return "no C++ compiler was found; install one (for example: apt-get install g++) or set CXX to one"
        if device_type == "npu" and importlib.util.find_spec("triton") is None:
            return "Inductor compiles Triton for an NPU, which is not installed: pip install triton-ascend"
        return None


def cpp_compiler(environ: Mapping[str, str]) -> str | None:
    """Where the C++ compiler is that Inductor would start: that of ``CXX``, or the default of the platform."""
    default = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    return shutil.which(environ.get("CXX") or default, path=environ.get("PATH"))
