"""The launches, forward and backward, as operations of torch.

Each is one pass: the forward reads gate and up and writes the product; the backward reads these and the gradient of the
product, and writes one gradient for each tensor, so only one if gate and up are one tensor.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.triton import operation

from ...reference import VARIANTS
from . import programs

_TILE = 1024
"""Elements of the gate for each program: 8 for each thread, one load of 16 bytes of a half type.

This keeps enough data on its way from memory: with 16 programs, of 32 registers a thread, a multiprocessor of an H100
asks for 64 KiB of gate and up at once, while 3.35 TB/s at a latency of 700 ns need 18 KiB. It also cuts the widths that
models have evenly: 3072, 11008 and 14336 are 3, 10.75 and 14 tiles.
"""

_ELEMENTS_OF_A_WARP = 256


def _product(gate: Tensor, up: Tensor | None, _activation: str, variant: str, *_: Any) -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    if gate.dtype is up.dtype or VARIANTS[variant].wide:
        return torch.empty_like(gate, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    return torch.empty_like(gate, dtype=dtype, memory_format=torch.contiguous_format)


def _gradients(_dy: Tensor, gate: Tensor, up: Tensor | None, of_gate: bool, of_up: bool, *_: Any) -> list[Tensor]:
    wanted = [gate] if of_gate else []
    wanted += [up] if up is not None and of_up else []
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in wanted]


@operation(
    "fuseplug_swiglu::gated(Tensor gate, Tensor? up, str activation, str variant, str layout, float? limit, "
    "float? scale, float beta) -> Tensor",
    _product,
)
def gated(
    y: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    variant: str,
    layout: str,
    limit: float | None,
    scale: float | None,
    beta: float,
) -> None:
    """`fuseplug_swiglu.reference.swiglu` without sparsity, for float16, bfloat16 and float32; computed in float32."""
    if not y.numel():
        return
    width = y.shape[-1]
    tiles, warps, constants = _constants(width, activation, variant, layout if up is None else "separate")
    programs.forward[(y.numel() // width * tiles,)](
        y, *_inputs(gate, up, width), *_numbers(activation, limit, scale, beta), *constants, num_warps=warps
    )


@operation(
    "fuseplug_swiglu::gated_backward(Tensor dy, Tensor gate, Tensor? up, bool of_gate, bool of_up, str activation, "
    "str variant, str layout, float? limit, float? scale, float beta) -> Tensor[]",
    _gradients,
)
def gated_backward(
    gradients: list[Tensor],
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    of_gate: bool,
    of_up: bool,
    activation: str,
    variant: str,
    layout: str,
    limit: float | None,
    scale: float | None,
    beta: float,
) -> None:
    """The wanted gradients of *gate* and *up*, from *dy*, the gradient of the result of `gated`."""
    if not dy.numel():
        return
    width = dy.shape[-1]
    tiles, warps, constants = _constants(width, activation, variant, layout if up is None else "separate")
    programs.backward[(dy.numel() // width * tiles,)](
        gradients[0] if of_gate else None,
        gradients[-1] if of_up else None,
        dy.contiguous(),
        *_inputs(gate, up, width),
        *_numbers(activation, limit, scale, beta),
        *constants,
        num_warps=warps,
    )


@functools.lru_cache(maxsize=1024)
def _constants(width: int, activation: str, variant: str, layout: str) -> tuple[int, int, tuple[Any, ...]]:
    """The number of tiles of a row, the warps of a program, and the constants that are compiled in."""
    row = VARIANTS[variant]
    block = min(_TILE, 1 << (width - 1).bit_length())
    warps = max(1, block // _ELEMENTS_OF_A_WARP)
    return -(-width // block), warps, (ACTIVATIONS[activation].formula, row.clamp, row.offset, layout, block)


def _numbers(activation: str, limit: float | None, scale: float | None, beta: float) -> tuple[float, float, float]:
    """Limit, scale and steepness, always as floats: Triton would compile once more for an integer."""
    return (
        math.inf if limit is None else float(limit),
        1.0 if scale is None else float(scale),
        float(ACTIVATIONS[activation].steepness(beta)),
    )


def _inputs(gate: Tensor, up: Tensor | None, width: int) -> tuple[Tensor, Tensor | None, int, int, int]:
    gate, gate_stride = _rows(gate)
    if up is None:
        return gate, None, width, gate_stride, 0
    up, up_stride = _rows(up)
    return gate, up, width, gate_stride, up_stride


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """*x* and the stride of its rows; a copy of *x* if the rows have no single stride or have gaps in them."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = x.reshape(-1, x.shape[-1])
    if x.stride(1) != 1:
        x = x.contiguous()
    return x, x.stride(0)
