"""What this machine is: its chip, and what its CANN has of what torch_npu calls.

Neither can be asked for while a graph is traced. What was last found then holds, which the check of a kernel has seen
to; what was not found is taken to be the worse.
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
    """Whether *op* can be called here: torch_npu has it, and CANN the kernel behind it.

    torch_npu looks for the kernel in the first call, and raises if there is none; of most operations it has an older
    one to call instead. So it is found out by a call, once.

    Args:
        op: An operation of torch_npu: ``"npu_clipped_swiglu"``.
        *sizes: Those of a float32 tensor that it takes as its only argument.
    """
    call = getattr(torch.ops.npu, op, None)
    if call is None:
        return False
    if op not in _KNOWN and not torch.compiler.is_compiling():
        if not torch.npu.is_available():  # type: ignore[attr-defined]
            return True  # planned for a machine of which nothing is known
        try:
            result = call(torch.zeros(*sizes, device="npu"))
        except RuntimeError:
            _KNOWN[op] = False
        else:
            if type(result) is not torch.Tensor:
                return True  # a fake one, for which no kernel ran
            _KNOWN[op] = True
    return _KNOWN.get(op, False)
