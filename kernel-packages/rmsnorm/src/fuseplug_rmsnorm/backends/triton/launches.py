"""The two launches as operations of torch: the memory they allocate, its layout, and the programs that fill it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug_backends.triton import operation, shared_memory

from ... import reference
from . import programs

WIDEST = 1 << 14
"""Elements of the longest row (or group) that a tile holds in registers."""

# Measured on an H200, in bfloat16: see docs/cuda.md.

_PER_LANE = 16
"""Elements of a tile that a lane holds: of a half type two loads of 16 bytes, which are enough to have in flight."""

_FEWEST_WARPS, _MOST_WARPS = 4, 32
"""Limits on the warps of a program. Below the first, rows share a program; above the second, a lane holds more."""

_FEWEST_WARPS_BACK = 8
"""The fewest warps of a program of the backward: heads of 128 take 210 µs, and with four warps 254 µs."""

_WARPS_PER_PROCESSOR = 16
"""Warps that go over all rows in the backward of a weight: in a half type, 16 KiB each of x and dy are in flight.

Each further program leaves one more row of float32 to be written and added up. With this number of warps, these rows
take ``8192 · 4`` bytes for each multiprocessor, whatever the width.
"""

_STAGES = 3
"""While rows are computed, the rows of the next two turns are on their way: 207 µs instead of 240 µs at 4096 columns,
392 µs instead of 505 µs at 8192."""

_WIDEST_STAGED = 1 << 13
"""The widest tile with `_STAGES` stages. Rows of 16384 take longer with them."""

_SCRATCH = 4
"""Bytes of shared memory that the compiler takes for itself, at most, for each element of a tile."""

_PARTS, _COLUMNS, _WARPS_TO_ADD = 256, 32, 8
"""The tile of `add_up`: columns of 128 bytes, the least that a load moves, so that many programs share the work."""


class _Tile(NamedTuple):
    width: int
    block: int
    rows: int


class _Form(NamedTuple):
    """The parts of a `reference.Variant` that matter if nothing is rounded on the way."""

    offset: bool
    weight_first: bool
    gate_first: bool
    sigmoid: bool


@functools.lru_cache(maxsize=1024)
def _tile(width: int, fewest_warps: int = _FEWEST_WARPS) -> tuple[_Tile, int]:
    """The tile for rows of *width* elements, and its number of warps."""
    block = 1 << (width - 1).bit_length()
    warps = min(max(block // (32 * _PER_LANE), fewest_warps), _MOST_WARPS)
    return _Tile(width, block, max(1, warps * 32 * _PER_LANE // block)), warps


@functools.lru_cache(maxsize=64)
def _form(variant: str) -> _Form:
    row = reference.VARIANTS[variant]
    return _Form(row.offset is not None, row.weight == "input", row.gate == "before", row.activation == "sigmoid")


@functools.lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; few in the interpreter, where each program takes time of its own."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 2


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """New memory for rows, in the order of the rows of *x*, without gaps."""
    y = torch.empty_like(x, dtype=dtype)
    if y.stride(-1) == 1:
        return y
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _rows(tensor: Tensor, dense: Tensor) -> tuple[Tensor, int]:
    """*tensor* and the stride of its rows, in the order of the rows of *dense*; a copy if there is no such stride."""
    if tensor.stride() == dense.stride():
        return tensor, tensor.shape[-1]
    leading = sorted(range(tensor.dim() - 1), key=dense.stride, reverse=True)
    leading = [dim for dim in leading if tensor.shape[dim] > 1]
    regular = all(
        tensor.stride(outer) == tensor.stride(inner) * tensor.shape[inner]
        for outer, inner in itertools.pairwise(leading)
    )
    if regular and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1):
        return tensor, tensor.stride(leading[-1]) if leading else tensor.shape[-1]
    return torch.empty_like(dense, dtype=tensor.dtype).copy_(tensor), tensor.shape[-1]


def _rows_or_none(tensor: Tensor | None, dense: Tensor) -> tuple[Tensor | None, int]:
    return (None, 0) if tensor is None else _rows(tensor, dense)


def _per_row(dense: Tensor, groups: int, values: Tensor | None = None) -> Tensor:
    """Memory for one number for each row, or for each group in it, in the order of the rows of *dense*.

    If *values* are given, numbers that were found before, the memory is theirs, or a copy if a hook on saved tensors
    has given them another layout.
    """
    hidden = dense.shape[-1]
    strides = (*(stride // hidden * groups for stride in dense.stride()[:-1]), 1)
    if values is not None and values.stride() == strides:
        return values
    new = torch.empty_strided((*dense.shape[:-1], groups), strides, dtype=torch.float32, device=dense.device)
    return new if values is None else new.copy_(values)


def _forward_results(x: Tensor, residual: Tensor | None, weight: Tensor | None, *arguments: Any) -> list[Tensor]:
    *_, variant, group_size, keep = arguments
    results = [_like(x, reference.result_dtype(x, weight, reference.VARIANTS[variant]))]
    if residual is not None:
        results.append(_like(x, x.dtype))
    if keep:
        results.append(_per_row(results[0], 1 if group_size is None else x.shape[-1] // group_size))
    return results


@operation(
    "fuseplug_rmsnorm::rms_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? gate, float eps, str variant,"
    " int? group_size, bool keep) -> Tensor[]",
    _forward_results,
)
def forward(
    results: list[Tensor],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    gate: Tensor | None,
    eps: float,
    variant: str,
    group_size: int | None,
    keep: bool,
) -> None:
    """``[y]``, then the sum if there is a *residual*, then with *keep* the reciprocal RMS that `backward` takes.

    The arguments are those of `reference.rms_norm`, checked there; *residual* is a tensor like x, added to x first.
    """
    y = results[0]
    hidden = x.shape[-1]
    tile, warps = _tile(group_size or hidden)
    tokens = x.numel() // hidden
    x, x_stride = _rows(x, y)
    residual, residual_stride = _rows_or_none(residual, y)
    gate, gate_stride = _rows_or_none(gate, y)
    programs.forward[(-(-tokens // tile.rows), hidden // tile.width)](
        y,
        None if residual is None else results[1],
        results[-1] if keep else None,
        x,
        residual,
        None if weight is None else weight.contiguous(),
        gate,
        x_stride,
        residual_stride,
        gate_stride,
        tokens,
        eps,
        *tile,
        *_form(variant),
        num_warps=warps,
    )


def _backward_results(
    _dy: Tensor, _dtotal: Any, x: Tensor, weight: Tensor | None, gate: Tensor | None, *arguments: Any
) -> list[Tensor]:
    wanted = arguments[-1]
    results = []
    if wanted[0]:
        results.append(_like(x, x.dtype))
    if wanted[1] and weight is not None:
        results.append(torch.empty_like(weight, memory_format=torch.contiguous_format))
    if wanted[2] and gate is not None:
        results.append(_like(x, gate.dtype))
    return results


@operation(
    "fuseplug_rmsnorm::rms_norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor? weight, Tensor? gate,"
    " Tensor rstd, str variant, int? group_size, bool[3] wanted) -> Tensor[]",
    _backward_results,
)
def backward(
    results: list[Tensor],
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    rstd: Tensor,
    variant: str,
    group_size: int | None,
    wanted: Sequence[bool],
) -> None:
    """The *wanted* gradients of x, weight and gate, in one pass over x and *dy*.

    x is the tensor that was normalised: the sum, if there was one. *dtotal* is the sum's own gradient, and *rstd* is
    from `forward`.
    """
    rest = iter(results)
    dx, dweight, dgate = (next(rest) if need else None for need in wanted)
    dense = next((tensor for tensor in (dx, dgate) if tensor is not None), None)
    if dense is None:
        dense = _like(x, x.dtype)  # not to be written to: only its layout matters
    hidden = x.shape[-1]
    tokens = x.numel() // hidden
    tile, warps = _tile(group_size or hidden, _FEWEST_WARPS_BACK)
    groups = hidden // tile.width
    parts, partial, stages = -(-tokens // tile.rows), dweight, 1
    if dweight is not None:
        together = max(1, _WARPS_PER_PROCESSOR // warps)
        parts = min(parts, max(1, _processors(x.device) * together // groups))
        stages = _stages(tile, together, x.device, dy, dtotal, x, gate)
        if parts > 1:
            partial = dweight.new_empty((parts, hidden), dtype=torch.float32)
    dy, dy_stride = _rows(dy, dense)
    dtotal, dtotal_stride = _rows_or_none(dtotal, dense)
    x, x_stride = _rows(x, dense)
    gate, gate_stride = _rows_or_none(gate, dense)
    programs.backward[(parts, groups)](
        dx,
        dgate,
        partial,
        dy,
        dtotal,
        x,
        None if weight is None else weight.contiguous(),
        gate,
        _per_row(dense, groups, rstd),
        dy_stride,
        dtotal_stride,
        x_stride,
        gate_stride,
        tokens,
        *tile,
        *_form(variant),
        stages,
        num_warps=warps,
    )
    if partial is not dweight:
        programs.add_up[(-(-hidden // _COLUMNS),)](
            dweight, partial, parts, hidden, _PARTS, _COLUMNS, num_warps=_WARPS_TO_ADD
        )


def _stages(tile: _Tile, together: int, device: torch.device, *read: Tensor | None) -> int:
    """How many tiles of the tensors *read* are in use or on their way, if *together* programs share a processor."""
    ahead = (_STAGES - 1) * sum(tensor.element_size() for tensor in read if tensor is not None)
    needed = tile.rows * tile.block * (ahead + _SCRATCH)
    return _STAGES if tile.block <= _WIDEST_STAGED and needed * together <= shared_memory(device) else 1
