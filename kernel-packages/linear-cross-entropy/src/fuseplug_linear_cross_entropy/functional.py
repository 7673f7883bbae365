"""The public functions, for every device: each uses the first kernel here that this machine can run on the device."""

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
