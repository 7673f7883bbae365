"""The public functions, on every device: each uses the first kernel of this package that can run there."""

from __future__ import annotations

from fuseplug_backends.functional import by_device

from . import reference
from .kernels import InductorRMSNormKernel, NpuRMSNormKernel, TritonRMSNormKernel

KERNELS = (NpuRMSNormKernel, TritonRMSNormKernel, InductorRMSNormKernel)

rms_norm = by_device(reference.rms_norm, KERNELS)
add_rms_norm = by_device(reference.add_rms_norm, KERNELS)
