"""RoPE as Inductor compiles it, on every device Inductor knows, the CPU included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fuseplug.inductor import CompiledLinear, plain

from . import reference

if TYPE_CHECKING:
    from .reference import Semantics

_LARGE = 1 << 15
"""Elements of q and k from which a compiled call is worth its fixed cost."""


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, variant: str = "half"
) -> tuple[Tensor, Tensor | None]:
    """`fuseplug_rope.reference.rope`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding: intermediate roundings to a half type are left out, so it is as a rule
    nearer to the exact one. Inside ``torch.compile``, ``torch.export`` and other tracers it *is* the reference, for the
    compiler around it to fuse further.
    """
    how = reference.check(q, k, cos, variant)
    if torch.compiler.is_compiling() or not _is_large(q, k, cos) or not plain(q, k, cos, sin):
        return reference.compute(how, q, k, cos, sin)
    xs = (q,) if k is None else (q, k)
    rotated = cos.shape[-1] * (2 if how.table == "half" else 1)
    constants = [(variant, rotated, _result_dtype(how, x, q, cos, sin)) for x in xs]
    q_out, *k_out = _fused(constants, xs, (cos, sin))
    return q_out, k_out[0] if k_out else None


def _is_large(q: Tensor, k: Tensor | None, cos: Tensor) -> bool:
    return (
        q.numel() + (k.numel() if k is not None else 0) >= _LARGE
        and q.dim() > 1
        and (k is None or (k.dim() == q.dim() and k.numel() > 0))
        and cos.dim() <= q.dim()
        and cos.shape[-1] % 2 == 0
    )


def _result_dtype(how: Semantics, x: Tensor, q: Tensor, cos: Tensor, sin: Tensor) -> torch.dtype:
    if how.back is not None:
        return q.dtype if how.back == "first" else x.dtype
    return torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype))


def rope_formula(x: Tensor, cos: Tensor, sin: Tensor, variant: str, rotated: int, dtype: torch.dtype) -> Tensor:
    """One rotation, in float32 throughout and rounded once, written for vectors: planes as a dimension of their own."""
    how = reference.VARIANTS[variant]
    wide = torch.promote_types(dtype, torch.float32)
    source, rest = reference.split(x, rotated, how)
    source, cos, sin = source.to(wide), cos.to(wide), sin.to(wide)
    if how.negated:
        sin = -sin
    rotate = _pairs if how.writes == "pairs" else _halves
    y = rotate(source, cos, sin, how).to(dtype)
    return reference.merged(y, None if rest is None else rest.to(dtype), how)


def _halves(x: Tensor, cos: Tensor, sin: Tensor, how: Semantics) -> Tensor:
    """Each coordinate apart, from its half or its place in the pairs; both are written in rows."""
    a, b = _planes(x, how.reads)
    (cos_a, cos_b), (sin_a, sin_b) = (_planes_of_table(table, how) for table in (cos, sin))
    return torch.stack((a * cos_a - b * sin_a, b * cos_b + a * sin_b), dim=-2).flatten(-2)


def _pairs(x: Tensor, cos: Tensor, sin: Tensor, how: Semantics) -> Tensor:
    """Element for element, in one row: what is written two apart is not written in vectors."""
    if how.table != "full":
        cos, sin = (_each_twice(table, x.shape[-1] // 2) for table in (cos, sin))
    a, b = _planes(x, "pairs")
    return x * cos + torch.stack((-b, a), dim=-1).flatten(-2) * sin


def _planes(x: Tensor, order: str) -> tuple[Tensor, ...]:
    half = x.shape[-1] // 2
    return x.unflatten(-1, (half, 2)).unbind(-1) if order == "pairs" else x.unflatten(-1, (2, half)).unbind(-2)


def _planes_of_table(table: Tensor, how: Semantics) -> tuple[Tensor, ...]:
    if how.table == "half":
        return table, table
    halves = _planes(table, "halves")
    return halves if how.table == "full" else (halves[0], halves[0])


def _each_twice(table: Tensor, planes: int) -> Tensor:
    half = table[..., :planes]
    return half.unsqueeze(-1).expand(*half.shape, 2).flatten(-2)


_fused = CompiledLinear(rope_formula)
