"""RoPE as Inductor compiles it, on every device Inductor knows, the CPU included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fuseplug.functional import computed_by
from fuseplug.inductor import CompiledLinear, plain
from fuseplug.torch_private import get_tracing_state

from .. import reference

if TYPE_CHECKING:
    from ..reference import Variant

_LARGE = 1 << 18
"""Elements of q and k from which a compiled call is worth its fixed cost: about 60 µs forward and 200 µs both ways,
where an eager one has 30 and 120.

On two x86 cores, in µs, eager and compiled: forward in bfloat16 98 and 102 at 160 thousand elements, 195 and 136 at 390
thousand, 651 and 338 at 1.6 million; forward and backward 338 and 409, 553 and 438, 2101 and 1813. In float32 forward
164 and 139, 303 and 183, 1754 and 795.
"""


def compute(how: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """`fuseplug_rope.reference.rope`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding: intermediate roundings to a half type are left out, so it is as a rule
    nearer to the exact one. Inside ``torch.compile``, ``torch.export`` and other tracers it *is* the reference, for the
    compiler around it to fuse further.
    """
    if torch.compiler.is_compiling() or get_tracing_state() is not None:
        return reference.compute(how, q, k, cos, sin)
    if _is_large(how, q, k, cos, sin) and plain(q, k, cos, sin):
        xs = (q,) if k is None else (q, k)
        rotated = cos.shape[-1] * (2 if how.table == "half" else 1)
        constants = [(how.name, rotated, reference.result_dtype(how, x, q, cos, sin)) for x in xs]
        q_out, *k_out = _fused(constants, xs, (cos, sin), keep_order=how.keeps_order)
        return q_out, k_out[0] if k_out else None
    if how is _LLAMA and not torch.is_grad_enabled() and _is_even(q, k, cos, sin) and plain(q, k, cos, sin):
        return _eager(q, k, cos, sin)
    return reference.compute(how, q, k, cos, sin)


rope = computed_by(compute, reference.rope)

_LLAMA = reference.VARIANTS["half"]


def _is_even(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> bool:
    alike = q.dtype is cos.dtype is sin.dtype and (k is None or k.dtype is q.dtype)
    return alike and cos.shape == sin.shape and not cos.shape[-1] % 2


def _eager(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same bits with the fewest calls, for one token at a time: the sign goes to the table, once for q and k."""
    half = cos.shape[-1] // 2
    signed = sin.clone()
    signed.narrow(-1, 0, half).neg_()
    q = (q * cos).add_(q.roll(half, -1) * signed)
    return q, None if k is None else (k * cos).add_(k.roll(half, -1) * signed)


def _is_large(how: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> bool:
    if q.numel() + (0 if k is None else k.numel()) < _LARGE:
        return False
    if how.writes == "pairs" and how.width != "whole":
        return False  # Inductor joins pairs and a rest element by element: 774 µs where eager takes 561
    alike = k is None or (k.dim() == q.dim() and k.numel() > 0)
    if not alike or q.dim() == 1 or q.numel() == 0 or cos.shape[-1] % 2 or cos.shape != sin.shape:
        return False
    return _broadcasts(cos, q) and (k is None or _broadcasts(cos, k))


def _broadcasts(table: Tensor, x: Tensor) -> bool:
    """Whether the rotation of *x* has the shape of *x*: tables of more tokens or batches would enlarge it."""
    dims = zip(reversed(table.shape[:-1]), reversed(x.shape[:-1]), strict=False)
    return table.dim() <= x.dim() and all(own in (1, size) for own, size in dims)


def rope_formula(x: Tensor, cos: Tensor, sin: Tensor, variant: str, rotated: int, dtype: torch.dtype) -> Tensor:
    """One rotation, in float32 throughout and rounded once, written for vectors and without buffers in between."""
    how = reference.VARIANTS[variant]
    wide = torch.promote_types(dtype, torch.float32)
    source, rest = reference.split(x, rotated, how)
    cos, sin = cos.to(wide), sin.to(wide)
    if how.negated:
        sin = -sin
    rotate = _pairs if how.writes == "pairs" else _halves
    y = rotate(source, cos, sin, how, dtype)
    return reference.merged(y, None if rest is None else rest.to(dtype), how)


def _halves(x: Tensor, cos: Tensor, sin: Tensor, how: Variant, dtype: torch.dtype) -> Tensor:
    """Each coordinate apart, from its half or its place in the pairs; both are written in rows.

    They are cast before they are joined, forward and backward, or what is joined is a buffer of wide numbers.
    """
    a, b = (plane.to(cos.dtype) for plane in _planes(x, how.reads))
    (cos_a, cos_b), (sin_a, sin_b) = (_planes_of_table(table, how) for table in (cos, sin))
    rotated = (a * cos_a - b * sin_a, b * cos_b + a * sin_b)
    return torch.stack([plane.to(dtype) for plane in rotated], dim=-2).flatten(-2)


def _pairs(x: Tensor, cos: Tensor, sin: Tensor, how: Variant, dtype: torch.dtype) -> Tensor:
    """Element for element, in one row: what is written two apart is not written in vectors."""
    x = x.to(cos.dtype)
    if how.table != "full":
        cos, sin = (_each_twice(table, x.shape[-1] // 2) for table in (cos, sin))
    a, b = _planes(x, "pairs")
    return (x * cos + torch.stack((-b, a), dim=-1).flatten(-2) * sin).to(dtype)


def _planes(x: Tensor, order: str) -> tuple[Tensor, ...]:
    half = x.shape[-1] // 2
    if order == "pairs":
        return torch.unflatten(x, -1, (half, 2)).unbind(-1)
    return torch.unflatten(x, -1, (2, half)).unbind(-2)


def _planes_of_table(table: Tensor, how: Variant) -> tuple[Tensor, ...]:
    if how.table == "half":
        return table, table
    halves = _planes(table, "halves")
    return halves if how.table == "full" else (halves[0], halves[0])


def _each_twice(table: Tensor, planes: int) -> Tensor:
    half = table[..., :planes]
    return half.unsqueeze(-1).expand(*half.shape, 2).flatten(-2)


_fused = CompiledLinear(rope_formula)
