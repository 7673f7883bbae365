"""Patches with which Liger-Kernel runs in Triton's interpreter, where the benchmark checks itself."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter


def let_peers_in() -> None:
    """Patch the interpreter so that the peers' kernels run in it.

    Kernels get floats as tensors, as compiled kernels do, and the functions of libdevice that some of them call.
    Arithmetic in bfloat16 is done on the numbers, whose bits the unpatched interpreter takes for integers. Nothing is
    tuned, because tuning needs a GPU.
    """
    os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"
    libdevice.rsqrt = lambda x: tl.rsqrt(x)
    libdevice.tanh = lambda x: 2.0 * tl.sigmoid(2.0 * x) - 1.0
    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_floats
    compute = interpreter.InterpreterBuilder.binary_op

    def with_bfloat16(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16 or op not in (np.add, np.subtract, np.multiply, np.divide):
            return compute(self, lhs, rhs, op)
        wide = [torch.from_numpy(each.data.view(np.int16)).view(torch.bfloat16).float().numpy() for each in (lhs, rhs)]
        narrow = torch.from_numpy(np.asarray(op(*wide))).to(torch.bfloat16)
        return interpreter.TensorHandle(narrow.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    interpreter.InterpreterBuilder.binary_op = with_bfloat16
