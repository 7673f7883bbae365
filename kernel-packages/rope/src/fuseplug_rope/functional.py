"""The public function: the first of these kernels that this machine can run on the device computes it."""

from __future__ import annotations

from fuseplug_backends.functional import by_device

from . import reference
from .kernels import InductorRoPEKernel, NpuRoPEKernel, TritonRoPEKernel

KERNELS = (NpuRoPEKernel, TritonRoPEKernel, InductorRoPEKernel)

rope = by_device(reference.rope, KERNELS)
