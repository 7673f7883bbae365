"""RoPE as Inductor compiles it, on every device Inductor knows, the CPU included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import CompiledLinear, worth_compiling

from .. import reference

if TYPE_CHECKING:
    from ..reference import Variant


def compute(variant: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """`fuseplug_rope.reference.rope`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding: intermediate roundings to a half type are left out, so the result is
    as a rule nearer to the exact one. Inside ``torch.compile``, ``torch.export`` and other tracers, the reference
    computes it, so that the compiler around it can fuse further.
    """
    if not (worth_compiling(q.shape, q, k, cos, sin) and _is_one_rotation(variant, q, k, cos, sin)):
        return by_reference(reference.compute, variant, q, k, cos, sin)
    xs = (q,) if k is None else (q, k)
    constants = [
        (variant.name, variant.width_rotated(cos), reference.result_dtype(variant, x, q, cos, sin)) for x in xs
    ]
    q_out, *k_out = _fused(constants, xs, (cos, sin), keep_order=variant.keeps_order)
    return q_out, k_out[0] if k_out else None


rope = computed_by(compute, reference.rope)


def _is_one_rotation(variant: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> bool:
    """Whether the formula computes this call, and faster than PyTorch does."""
    if variant.writes == "pairs" and variant.width != "whole":
        return False  # Inductor joins pairs and the rest element by element: 774 µs, where eager takes 561
    alike = k is None or (k.dim() == q.dim() and k.numel() > 0)
    if not alike or q.dim() == 1 or cos.shape[-1] % 2 or cos.shape != sin.shape:
        return False
    if variant.keeps_order and not _lie_alike(q, q if k is None else k):
        return False
    return _broadcasts(cos, q) and (k is None or _broadcasts(cos, k))


def _lie_alike(q: Tensor, k: Tensor) -> bool:
    """Whether q and k have one memory order, with rows in one piece: the program gives it to both results."""
    dims = [dim for dim in range(q.dim()) if q.shape[dim] > 1 and k.shape[dim] > 1]
    return q.stride(-1) == k.stride(-1) == 1 and sorted(dims, key=q.stride) == sorted(dims, key=k.stride)


def _broadcasts(table: Tensor, x: Tensor) -> bool:
    """Whether the rotation of *x* has the shape of *x*: tables of more tokens or batches would enlarge it."""
    dims = zip(reversed(table.shape[:-1]), reversed(x.shape[:-1]), strict=False)
    return table.dim() <= x.dim() and all(extent in (1, size) for extent, size in dims)


def rope_formula(x: Tensor, cos: Tensor, sin: Tensor, variant: str, rotated: int, dtype: torch.dtype) -> Tensor:
    """One rotation, in float32 throughout and rounded once, written for vectors and without buffers in between."""
    row = reference.VARIANTS[variant]
    wide = torch.promote_types(dtype, torch.float32)
    source, rest = reference.split(x, rotated, row)
    cos, sin = cos.to(wide), sin.to(wide)
    if row.negated:
        sin = -sin
    rotate = _pairs if row.writes == "pairs" else _halves
    y = rotate(source, cos, sin, row, dtype)
    return reference.merged(y, None if rest is None else rest.to(dtype), row)


def _halves(x: Tensor, cos: Tensor, sin: Tensor, variant: Variant, dtype: torch.dtype) -> Tensor:
    """Rotate each coordinate apart, read from its half or its place in the pairs; both are written in rows.

    The coordinates are cast before they are joined, forward and backward. Otherwise the joined buffer would be wide.
    """
    a, b = (plane.to(cos.dtype) for plane in _planes(x, variant.reads))
    (cos_a, cos_b), (sin_a, sin_b) = (_planes_of_table(table, variant) for table in (cos, sin))
    rotated = (a * cos_a - b * sin_a, b * cos_b + a * sin_b)
    return torch.stack([plane.to(dtype) for plane in rotated], dim=-2).flatten(-2)


def _pairs(x: Tensor, cos: Tensor, sin: Tensor, variant: Variant, dtype: torch.dtype) -> Tensor:
    """Rotate element by element, in one row: Inductor does not vectorise writes to every second element."""
    x = x.to(cos.dtype)
    if variant.table != "full":
        cos, sin = (_each_twice(table, x.shape[-1] // 2) for table in (cos, sin))
    a, b = _planes(x, "pairs")
    return (x * cos + torch.stack((-b, a), dim=-1).flatten(-2) * sin).to(dtype)


def _planes(x: Tensor, order: str) -> tuple[Tensor, ...]:
    half = x.shape[-1] // 2
    if order == "pairs":
        return torch.unflatten(x, -1, (half, 2)).unbind(-1)
    return torch.unflatten(x, -1, (2, half)).unbind(-2)


def _planes_of_table(table: Tensor, variant: Variant) -> tuple[Tensor, ...]:
    if variant.table == "half":
        return table, table
    halves = _planes(table, "halves")
    return halves if variant.table == "full" else (halves[0], halves[0])


def _each_twice(table: Tensor, planes: int) -> Tensor:
    half = table[..., :planes]
    return half.unsqueeze(-1).expand(*half.shape, 2).flatten(-2)


_fused = CompiledLinear(rope_formula)
