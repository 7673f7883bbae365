"""The public function, for every device: it uses the first kernel here that this machine can run on the device."""

from __future__ import annotations

from fuseplug_backends.functional import by_device

from . import reference
from .kernels import InductorGatedDeltaRuleKernel, NpuGatedDeltaRuleKernel

KERNELS = (NpuGatedDeltaRuleKernel, InductorGatedDeltaRuleKernel)

gated_delta_rule = by_device(reference.gated_delta_rule, KERNELS)
