"""The public functions, on every device: by the first kernel here that this machine can run there."""

from __future__ import annotations

from fuseplug_backends.functional import by_device

from . import reference
from .kernels import (
    InductorLinearCrossEntropyKernel,
    NpuLinearCrossEntropyKernel,
    TritonLinearCrossEntropyKernel,
)

KERNELS = (NpuLinearCrossEntropyKernel, TritonLinearCrossEntropyKernel, InductorLinearCrossEntropyKernel)

linear_cross_entropy = by_device(reference.linear_cross_entropy, KERNELS)
linear_logprob = by_device(reference.linear_logprob, KERNELS)
