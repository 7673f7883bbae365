"""The public function, on every device: it uses the first kernel of this package that can run there."""

from __future__ import annotations

from fuseplug_backends.functional import by_device

from . import reference
from .kernels import InductorSwiGLUKernel, NpuSwiGluKernel, TritonSwiGLUKernel

KERNELS = (NpuSwiGluKernel, TritonSwiGLUKernel, InductorSwiGLUKernel)

swiglu = by_device(reference.swiglu, KERNELS)
