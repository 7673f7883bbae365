"""What Liger-Kernel needs to run in Triton's interpreter, where the benchmark checks itself."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter


def let_peers_in() -> None:
    """Give kernels their floats as tensors, as compiled ones get them, and the function of libdevice that one calls.

    And let nothing be tuned, which takes a GPU.
    """
    os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"
    libdevice.rsqrt = lambda x: tl.rsqrt(x)
    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_floats
