"""Gates of `fuseplug_moe.reference.GATES`, and their derivatives, on numbers in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from fuseplug.triton.activations import activate


@triton.jit
def gate_side(gate, limit, beta, FORMULA: tl.constexpr, CLAMP: tl.constexpr):
    """The factor that comes from the gate, and its slope."""
    passes = gate <= limit
    value, slope = activate(tl.where(gate > limit, limit, gate) if CLAMP == "before" else gate, beta, FORMULA)
    if CLAMP == "before":
        slope = tl.where(passes, slope, 0.0)
    elif CLAMP == "after":
        slope = tl.where(value <= limit, slope, 0.0)
        value = tl.where(value > limit, limit, value)
    return value, slope


@triton.jit
def up_side(up, limit, CLAMP: tl.constexpr, OFFSET: tl.constexpr):
    """The factor that comes from up, and its slope."""
    slope = tl.full(up.shape, 1.0, tl.float32)
    if CLAMP is not None:
        slope = tl.where((up >= -limit) & (up <= limit), slope, 0.0)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return up + OFFSET, slope
