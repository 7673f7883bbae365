"""The public function: the first of these kernels that this machine can run on the device computes it."""

from __future__ import annotations

from fuseplug_backends.functional import by_device

from . import reference
from .kernels import InductorMoEKernel, NpuFusedMoEKernel, TritonMoEKernel

KERNELS = (NpuFusedMoEKernel, TritonMoEKernel, InductorMoEKernel)

moe = by_device(reference.moe, KERNELS)
