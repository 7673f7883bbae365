"""RMSNorm for tensors on whatever device: by the first of the kernels here that this machine can run there."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .kernels import InductorRMSNormKernel, NpuRMSNormKernel, TritonRMSNormKernel


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    variant: str = "llama",
    gate: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor:
    """`fuseplug_rmsnorm.reference.rms_norm`, fused: the same arguments, result up to rounding, and errors.

    On an NPU it is `fuseplug_rmsnorm.npu.rms_norm`; on a GPU `fuseplug_rmsnorm.triton.rms_norm`; elsewhere, or where
    these cannot run, `fuseplug_rmsnorm.inductor.rms_norm`; and without a compiler for that the reference.
    """
    compute = _module(x.device.type).rms_norm
    return compute(x, weight, eps, variant=variant, gate=gate, group_size=group_size)  # type: ignore[no-any-return]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    """`fuseplug_rmsnorm.reference.add_rms_norm`, fused: what stands before each block of a transformer.

    On GPUs it is one launch, and on NPUs for the variant ``"llama"``. Elsewhere it is the addition and `rms_norm`.
    """
    module = _module(x.device.type)
    if hasattr(module, "add_rms_norm"):
        return module.add_rms_norm(x, residual, weight, eps, variant=variant)  # type: ignore[no-any-return]
    return reference.add_rms_norm(x, residual, weight, eps, variant=variant, norm=module.rms_norm)


def _module(device_type: str) -> ModuleType:
    """What computes on this type of device."""
    return sys.modules[_name(device_type)]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name(device_type: str) -> str:
    """That of the `_module`, which is loaded; Dynamo does not look into how it is chosen."""
    return _choose(device_type)


@functools.lru_cache(maxsize=32)
def _choose(device_type: str) -> str:
    for kernel in (NpuRMSNormKernel(), TritonRMSNormKernel(), InductorRMSNormKernel()):
        served = not kernel.device_types or device_type in kernel.device_types
        if served and kernel.unavailable(device_type) is None:
            return importlib.import_module(kernel.function.partition(":")[0]).__name__
    return reference.__name__
