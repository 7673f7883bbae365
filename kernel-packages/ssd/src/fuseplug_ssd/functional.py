"""The public function, for every device: computed by the first kernel below that this machine can run there."""

from __future__ import annotations

from fuseplug_backends.functional import by_device

from . import reference
from .kernels import InductorSSDKernel, NpuSSDKernel

KERNELS = (NpuSSDKernel, InductorSSDKernel)

ssd = by_device(reference.ssd, KERNELS)
