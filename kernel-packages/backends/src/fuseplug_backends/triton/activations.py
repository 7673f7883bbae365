"""The formulas of `fuseplug_backends.activations`, clamped or not, and their derivatives, on numbers in registers.

The programs of kernels use them. Importing this module imports triton, which no other module of this package does.
"""

# ruff: noqa: RET505 - Triton also compiles the code after a return, unless that code is in a branch

from __future__ import annotations

import torch
import triton
import triton.language as tl

OPEN: tl.constexpr = tl.constexpr(torch.__version__ >= "2.14")
"""Whether a clamp blocks the gradient at the limit itself, as torch does from 2.14 on; before, torch let it through."""


@triton.jit
def activate(x, beta, FORMULA: tl.constexpr):
    """A formula of `fuseplug_backends.triton.FORMULAS` and its derivative (at a kink, torch's own), in float32."""
    if FORMULA == "swish":  # x · σ(βx)
        share = tl.sigmoid(beta * x)
        value = x * share
        return value, share + beta * value * (1.0 - share)
    elif FORMULA == "gelu":  # x · Φ(x)
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return x * share, share + x * density
    elif FORMULA == "gelu_tanh":
        # ½(1 + tanh u) is σ(2u), which neither cancels nor overflows.
        square = x * x
        share = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * square))
        value = x * share
        rest = value * (1.0 - share)
        steep = 1.5957691216057308 * (1.0 + 0.134145 * square)  # may be infinite where rest is zero
        return value, share + tl.where(rest == 0.0, 0.0, rest * steep)
    elif FORMULA == "relu":
        return tl.where(x < 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)  # NaN stays
    elif FORMULA == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive, 2.0 * positive
    else:
        tl.static_assert(FORMULA == "sigmoid")
        share = tl.sigmoid(x)
        return share, share * (1.0 - share)


@triton.jit
def gate_factor(gate, limit, beta, FORMULA: tl.constexpr, CLAMP: tl.constexpr):
    """The activated gate and its derivative with respect to the gate, in float32.

    *CLAMP* says whether the gate is clamped from above to *limit* ``"before"`` or ``"after"`` the activation, or never.
    As in torch, NaN stays NaN, and a clamp lets no gradient of NaN through.
    """
    if CLAMP == "before":
        value, slope = activate(tl.where(gate > limit, limit, gate), beta, FORMULA)
        slope = tl.where(inside(gate, limit), slope, 0.0)
    else:
        value, slope = activate(gate, beta, FORMULA)
    if CLAMP == "after":
        # Not plain zero: where the slope is infinite or NaN, torch's gradient is NaN, too.
        slope = tl.where(inside(value, limit), slope, 0.0 * slope)
        value = tl.where(value > limit, limit, value)
    return value, slope


@triton.jit
def clamped_up(up, limit, CLAMP: tl.constexpr):
    """Up, clamped to ±*limit* if the gate is clamped, and its derivative: 1 inside the limits, 0 elsewhere."""
    slope = tl.full(up.shape, 1.0, tl.float32)
    if CLAMP is not None:
        slope = tl.where(inside(up, limit) & inside(-up, limit), slope, 0.0)
        up = tl.where(up < -limit, -limit, up)
        up = tl.where(up > limit, limit, up)
    return up, slope


@triton.jit
def inside(x, limit):
    """Where a clamp from above to *limit* lets gradients of *x* through."""
    if OPEN:
        return x < limit
    else:
        return x <= limit
