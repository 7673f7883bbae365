"""The public function, on every device: by the first kernel here that this machine can run there."""

from __future__ import annotations

from fuseplug_backends.functional import by_device

from . import reference
from .kernels import InductorRoPEKernel, NpuRoPEKernel, TritonRoPEKernel

KERNELS = (NpuRoPEKernel, TritonRoPEKernel, InductorRoPEKernel)

rope = by_device(reference.rope, KERNELS)
