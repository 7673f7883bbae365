"""Which RMSNorm kernels there are. Nothing here imports torch."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Iterable
from typing import ClassVar

from fuseplug import BaseKernel, Proposal, Rejection, Site


class RMSNormKernel(BaseKernel):
    """The base of every RMSNorm kernel: a subclass names its id, its function and its device types.

    The function has the signature of `fuseplug_rmsnorm.reference.rms_norm`.
    """

    op: ClassVar[str] = "rmsnorm"
    reference: ClassVar[str] = "fuseplug_rmsnorm.reference:rms_norm"

    def match(self, site: Site) -> Iterable[Proposal] | Rejection | None:
        """Recognise an RMSNorm by its structure, in every variant of the reference."""
        from .sites import match

        return match(site)


class InductorRMSNormKernel(RMSNormKernel):
    """RMSNorm as Inductor compiles it, for every device Inductor knows."""

    kernel_id: ClassVar[str] = "inductor_fused_rmsnorm"
    function: ClassVar[str] = "fuseplug_rmsnorm.inductor:rms_norm"
    check_sizes: ClassVar[tuple[int, ...]] = (1 << 10, 1 << 19)  # below and above what is worth a compiled call

    def unavailable(self, device_type: str) -> str | None:
        """Inductor compiles C++ for the CPU, so there it needs a compiler."""
        if device_type != "cpu" or _cpp_compiler() is not None:
            return None
        return "no C++ compiler was found; install one (for example: apt-get install g++) or set CXX to one"


@functools.cache
def _cpp_compiler() -> str | None:
    # Inductor looks for $CXX and for this default, but starts the program to see; finding the file is enough here.
    default = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX") or default)
