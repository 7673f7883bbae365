"""The base of kernels that Inductor compiles, and what they need of the machine."""

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
    """The base of kernels that Inductor compiles. List it before the base that has the op.

    ``class InductorRMSNormKernel(InductorKernel, RMSNormKernel)``

    A traced call goes to the original: the compiler of the whole model fuses the original with the code around it.
    """

    when_traced: ClassVar[Literal["kernel", "original"]] = "original"
    rehearsal: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"cpu": "fuseplug_backends.inductor.rehearsal:side_by_side"}
    )

    def unavailable(self, device_type: str) -> str | None:
        """Return the remedy if Inductor lacks a C++ compiler for the CPU, or Ascend's own Triton for an NPU."""
        if device_type == "cpu" and cpp_compiler(os.environ) is None:
            return "no C++ compiler was found; install one (for example: apt-get install g++) or set CXX to one"
        if device_type == "npu" and importlib.util.find_spec("triton") is None:
            return "for an NPU, Inductor needs Triton, which is not installed: pip install triton-ascend"
        return None


def cpp_compiler(environ: Mapping[str, str]) -> str | None:
    """The path of the C++ compiler that Inductor would start, from ``CXX`` or the platform's default, if it exists."""
    default = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    return shutil.which(environ.get("CXX") or default, path=environ.get("PATH"))
