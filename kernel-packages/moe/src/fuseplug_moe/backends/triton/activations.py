"""Gates of `fuseplug_moe.reference.GATES`, and their derivatives, on numbers in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activation(x, alpha, NAME: tl.constexpr):
    """The activation of a gate, and its slope."""
    if NAME == "relu":
        value = tl.where(x < 0, 0.0, x)  # NaN stays
        slope = tl.where(x > 0, 1.0, 0.0)
    elif NAME == "relu2":
        positive = tl.where(x < 0, 0.0, x)
        value = positive * positive
        slope = 2 * positive
    elif NAME == "gelu":
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif NAME == "gelu-tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2 · z, which does not overflow.
        below = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value = x * below
        slope = below + value * (1 - below) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        sharp = alpha if NAME == "sigmoid-linear" else 1.0
        below = tl.sigmoid(sharp * x)
        value = x * below
        slope = below * (1 + sharp * x * (1 - below))
    return value, slope


@triton.jit
def gate_side(gate, limit, alpha, NAME: tl.constexpr, CLAMP: tl.constexpr):
    """The factor that comes from the gate, and its slope."""
    passes = gate <= limit
    value, slope = activation(tl.where(gate > limit, limit, gate) if CLAMP == "before" else gate, alpha, NAME)
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
