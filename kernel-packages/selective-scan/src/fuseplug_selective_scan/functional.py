"""The public function, for every device: computed by the first kernel below that this machine can run there."""

from __future__ import annotations

from fuseplug_backends.functional import by_device

from . import reference
from .kernels import InductorSelectiveScanKernel

KERNELS = (InductorSelectiveScanKernel,)

selective_scan = by_device(reference.selective_scan, KERNELS)
