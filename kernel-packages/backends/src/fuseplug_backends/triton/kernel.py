"""The base of kernels written in Triton, and what they need of the machine."""

from __future__ import annotations

import importlib.util
import os
from typing import ClassVar

from fuseplug import BaseKernel

FORMULAS = frozenset({"swish", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"})
"""The rows of `fuseplug_backends.activations.ACTIVATIONS` that `fuseplug_backends.triton.activations` computes."""

_OLDEST_CAPABILITY = (8, 0)
"""The lowest compute capability of an NVIDIA GPU for Triton, according to its README."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU, as with ``TRITON_INTERPRET=1``."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


class TritonKernel(BaseKernel):
    """The base of kernels written in Triton. List it before the base that has the op.

    ``class TritonRMSNormKernel(TritonKernel, RMSNormKernel)``

    To torch, GPUs of AMD are ``"cuda"``, too. In Triton's interpreter, the CPU is one of the kernel's device types.
    """

    device_types: ClassVar[tuple[str, ...]] = ("cuda", "xpu", *(("cpu",) if interpreted() else ()))
    # The interpreter takes milliseconds for each program, and a large check has thousands.
    check_sizes: ClassVar[tuple[int, ...]] = (512,) if interpreted() else BaseKernel.check_sizes

    def unavailable(self, device_type: str) -> str | None:
        """Return the remedy if Triton is not installed, or an NVIDIA GPU is too old for it."""
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed: pip install triton"
        return _too_old() if device_type == "cuda" else None


def _too_old() -> str | None:
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        if torch.cuda.get_device_capability(index) < _OLDEST_CAPABILITY:
            name = torch.cuda.get_device_name(index)
            return f"Triton needs compute capability 8.0, and {name} has less: hide it with CUDA_VISIBLE_DEVICES"
    return None
