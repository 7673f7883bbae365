"""This machine: its chip, and the operations of torch_npu for which its CANN has a kernel.

Neither can be asked for while a graph is traced. The last answer then holds; the check of a kernel has asked before.
Without an answer, the worse one is assumed.
"""

from __future__ import annotations

import torch

from .chips import A5, family

_KNOWN: dict[str, bool] = {}


def is_950() -> bool:
    """Whether the current device is an Ascend 950, whose kernels have other limits than those of Atlas A2 and A3."""
    if not torch.compiler.is_compiling():
        _KNOWN["950"] = family(torch.npu.get_device_name()) == A5  # type: ignore[attr-defined]
    return _KNOWN.get("950", True)


def cann_has(op: str, *sizes: int) -> bool:
    """Whether *op* can be called here: torch_npu has it, and CANN has the kernel behind it.

    torch_npu looks for the kernel at the first call, and raises if there is none; for most operations, torch_npu has an
    older one to call instead. So a single call, made once, tells whether *op* works.

    Args:
        op: An operation of torch_npu, such as ``"npu_clipped_swiglu"``.
        *sizes: The sizes of a float32 tensor that *op* takes as its only argument.
    """
    call = getattr(torch.ops.npu, op, None)
    if call is None:
        return False
    if op not in _KNOWN and not torch.compiler.is_compiling():
        if not torch.npu.is_available():  # type: ignore[attr-defined]
            return True  # planned for another machine, about which nothing is known
        try:
            result = call(torch.zeros(*sizes, device="npu"))
        except RuntimeError:
            _KNOWN[op] = False
        else:
            if type(result) is not torch.Tensor:
                return True  # a fake tensor: no kernel ran
            _KNOWN[op] = True
    return _KNOWN.get(op, False)
