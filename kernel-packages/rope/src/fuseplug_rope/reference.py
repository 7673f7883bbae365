"""What a rotary position embedding computes, in plain PyTorch: one rotation, and a table of how models write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

__all__ = ["VARIANTS", "Variant", "compute", "rope"]


@dataclass(frozen=True)
class Variant:
    """How one variant pairs, reads its tables, casts and rounds. The defaults are Llama's.

    Two rows may describe the same function of real numbers and still be two variants: they round differently, in the
    values or in the gradients alone (a tensor that is cast twice gets two gradients, each rounded before they are
    added).

    Attributes:
        reads: Which elements of x are the two coordinates of a plane: one of each of its ``"halves"``, or neighbours,
            ``"pairs"``.
        writes: Where the rotated coordinates go. Multi-head latent attention reads pairs and writes halves.
        table: What cos and sin hold: an angle for each element of x, ``"full"``; an angle for each plane, ``"half"``;
            or an angle for each element, of which only the ``"first-half"`` is read, one for each plane.
        form: How the rotation is written: ``x * cos + rotate(x) * sin``, ``"rotate"``; each coordinate apart,
            ``"parts"``; with ``"complex"`` numbers; or as a product with 2 × 2 matrices, ``"matrix"``.
        widen: Whether x is cast to ``promote(x.dtype, float32)``: ``"once"``, or ``"twice"``, for each of the two
            products.
        widen_table: Whether cos and sin are cast to that dtype before they are multiplied.
        back: The dtype to which the result is cast: that of x itself, ``"own"``, or that of q, for k, too, ``"first"``.
            With ``None``, the result has the dtype to which x and the tables promote.
        width: Which elements are rotated if the tables have angles for fewer elements than x has: the ``"leading"`` or
            the ``"trailing"`` ones. With ``"whole"``, the tables must not have fewer.
        negated: Whether the rotation is by the negative angle.
        name: The variant's key in `VARIANTS`.
    """

    reads: Literal["halves", "pairs"] = "halves"
    writes: Literal["halves", "pairs"] = "halves"
    table: Literal["full", "half", "first-half"] = "full"
    form: Literal["rotate", "parts", "complex", "matrix"] = "rotate"
    widen: Literal["once", "twice"] | None = None
    widen_table: bool = False
    back: Literal["own", "first"] | None = None
    width: Literal["whole", "leading", "trailing"] = "whole"
    negated: bool = False
    name: str = field(default="", compare=False)

    @property
    def keeps_order(self) -> bool:
        """Whether the result's dimensions lie in memory in the order of those of x.

        They do if the result is a sum of products. A result that cat or stack joins at the end is contiguous.
        """
        return self.width == "whole" and self.reads == self.writes and self.form in ("rotate", "complex")

    def width_rotated(self, table: Tensor) -> int:
        """How many elements are rotated by *table*, cos or sin, ``(..., angles)``."""
        return table.shape[-1] * (2 if self.table == "half" else 1)

    def is_cast(self, x: Tensor) -> bool:
        """Whether autocast is on and gives *x* rotated another dtype, as it does in the one form that takes a sum."""
        return self.form == "matrix" and torch.is_autocast_enabled(x.device.type)


def _pairs(**differs: object) -> Variant:
    return Variant(reads="pairs", writes="pairs", **differs)  # type: ignore[arg-type]


_ROWS = {
    "half": Variant(),
    "half-partial": Variant(width="leading"),
    "half-vision": Variant(widen="once", widen_table=True, back="own"),
    "half-promoting": Variant(back="own"),
    "half-wide": Variant(widen="twice", back="first"),
    "half-wide-tables": Variant(widen="once", widen_table=True, back="first"),
    "half-size": Variant(table="half", form="parts"),
    "half-negated": Variant(negated=True),
    "half-size-negated": Variant(table="half", form="parts", back="own", negated=True),
    "half-size-negated-wide": Variant(table="half", form="parts", widen="once", back="own", negated=True),
    "interleaved": _pairs(),
    "interleaved-partial": _pairs(width="leading"),
    "interleaved-wide": _pairs(widen="once", back="first"),
    "interleaved-wide-own": _pairs(widen="once", back="own"),
    "interleaved-vision": _pairs(widen="once", widen_table=True, back="own"),
    "interleaved-wide-twice": _pairs(widen="twice", back="first"),
    "interleaved-first-half": _pairs(table="first-half"),
    "interleaved-first-half-partial": _pairs(table="first-half", width="leading"),
    "interleaved-first-half-wide": _pairs(table="first-half", widen="twice", back="first"),
    "interleaved-repeated": _pairs(table="half"),
    "interleaved-trailing": _pairs(table="half", widen="twice", back="own", width="trailing"),
    "interleaved-half-size": _pairs(table="half", form="parts"),
    "interleaved-half-size-partial": _pairs(table="half", form="parts", width="leading"),
    "interleaved-half-size-wide": _pairs(table="half", form="parts", widen="once", back="own"),
    "interleaved-matrix": _pairs(table="first-half", form="matrix"),
    "complex": _pairs(table="half", form="complex", widen="once", back="own"),
    "mla": Variant(reads="pairs", table="first-half", form="parts"),
    "mla-full-table": Variant(reads="pairs"),
}
VARIANTS = {name: replace(row, name=name) for name, row in _ROWS.items()}
"""Every variant by name, the likely ones first."""


def compute(variant: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """`rope` for arguments that were checked.

    Args:
        variant: The variant.
        q: ``(..., head_dim)``, floating.
        k: Like *q*, perhaps with other numbers of heads, or ``None``.
        cos: ``(..., angles)``, floating, broadcastable to *q* and *k* but for the last dimension.
        sin: Like *cos*.

    Returns:
        *q* and *k* rotated, in their shapes; each in its `result_dtype`, but ``None`` for a *k* of ``None``.
    """
    rotated = variant.width_rotated(cos)
    if variant.widen_table:
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = cos.to(wide), sin.to(wide)
    if variant.table == "first-half":
        cos, sin = cos[..., : rotated // 2], sin[..., : rotated // 2]
    tables = _TABLES[variant.form](variant, cos, sin)
    q_out = _compute_one(variant, q, rotated, tables, q.dtype)
    if k is None:
        return q_out, None
    return q_out, _compute_one(variant, k, rotated, tables, q.dtype if variant.back == "first" else k.dtype)


def result_dtype(variant: Variant, x: Tensor, q: Tensor, cos: Tensor, sin: Tensor) -> torch.dtype:
    """The dtype of *x* rotated, where *x* is *q* itself or the k that comes with it."""
    if variant.back is not None:
        return q.dtype if variant.back == "first" else x.dtype
    return torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype))


def planes(x: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """The two coordinates ``(..., width / 2)`` of every plane of ``(..., width)``, in halves or in pairs."""
    if order == "pairs":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def joined(first: Tensor, second: Tensor, order: str) -> Tensor:
    """The inverse of `planes`."""
    if order == "pairs":
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)


def split(x: Tensor, rotated: int, variant: Variant) -> tuple[Tensor, Tensor | None]:
    """The elements of *x* ``(..., head_dim)`` that are rotated, ``(..., rotated)``, and the rest."""
    if variant.width == "trailing":
        return x[..., -rotated:], x[..., :-rotated]
    return (x, None) if variant.width == "whole" else (x[..., :rotated], x[..., rotated:])


def merged(rotated: Tensor, rest: Tensor | None, variant: Variant) -> Tensor:
    """The inverse of `split`."""
    if rest is None:
        return rotated
    return torch.cat((rest, rotated) if variant.width == "trailing" else (rotated, rest), dim=-1)


Tables = tuple[Tensor, ...]


def _compute_one(variant: Variant, x: Tensor, rotated: int, tables: Tables, back: torch.dtype) -> Tensor:
    source, rest = split(x, rotated, variant)
    wide = torch.promote_types(x.dtype, torch.float32)
    first = source if variant.widen is None else source.to(wide)
    second = source.to(wide) if variant.widen == "twice" else first
    y = _FORMS[variant.form](variant, first, second, tables)
    return merged(y if variant.back is None else y.to(back), rest, variant)


def _whole_tables(variant: Variant, cos: Tensor, sin: Tensor) -> Tables:
    """One angle for each element."""
    if variant.table == "full":
        return cos, sin
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)


def _tables(_variant: Variant, cos: Tensor, sin: Tensor) -> Tables:
    """One angle for each plane."""
    return cos, sin


def _rotate(variant: Variant, first: Tensor, second: Tensor, tables: Tables) -> Tensor:
    cos, sin = tables
    if variant.reads != variant.writes:
        first = second = joined(*planes(first, variant.reads), variant.writes)
    a, b = planes(second, variant.writes)
    turned = joined(b, -a, variant.writes) if variant.negated else joined(-b, a, variant.writes)
    return first * cos + turned * sin


def _parts(variant: Variant, first: Tensor, _second: Tensor, tables: Tables) -> Tensor:
    cos, sin = tables
    if variant.negated:
        sin = -sin
    a, b = planes(first, variant.reads)
    return joined(a * cos - b * sin, b * cos + a * sin, variant.writes)


def _complex_tables(_variant: Variant, cos: Tensor, sin: Tensor) -> Tables:
    return (torch.complex(cos, sin),)


def _complex(_variant: Variant, first: Tensor, _second: Tensor, tables: Tables) -> Tensor:
    numbers = torch.view_as_complex(first.reshape(*first.shape[:-1], first.shape[-1] // 2, 2))
    return torch.view_as_real(numbers * tables[0]).flatten(-2)


def _matrices(_variant: Variant, cos: Tensor, sin: Tensor) -> Tables:
    return (torch.stack((cos, -sin, sin, cos), dim=-1).view(*cos.shape, 2, 2),)


def _matrix(_variant: Variant, first: Tensor, _second: Tensor, tables: Tables) -> Tensor:
    rows = first.reshape(*first.shape[:-1], first.shape[-1] // 2, 1, 2)
    return (rows * tables[0]).sum(-1).flatten(-2)


_TABLES = {"rotate": _whole_tables, "parts": _tables, "complex": _complex_tables, "matrix": _matrices}
_FORMS: dict[str, Callable[[Variant, Tensor, Tensor, Tables], Tensor]] = {
    "rotate": _rotate,
    "parts": _parts,
    "complex": _complex,
    "matrix": _matrix,
}


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    variant: str = "half",
    compute: Callable[..., tuple[Tensor, Tensor | None]] = compute,
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embedding (Su et al. 2021, RoFormer, arXiv:2104.09864).

    Each plane ``(a, b)`` of the last dimension becomes ``(a cos θ - b sin θ, b cos θ + a sin θ)``, rounded exactly as
    *variant* rounds it, values and gradients.

    Args:
        q: ``(..., head_dim)``, floating, of any strides; usually ``(batch, heads, sequence, head_dim)`` in the memory
            of ``(batch, sequence, heads, head_dim)``.
        k: Like *q*, perhaps with other numbers of heads; ``None`` to rotate *q* alone.
        cos: ``(..., angles)``, broadcastable to *q* and to *k* but for the last dimension, which is the number of
            rotated elements, or half of it where the variant's table says so.
        sin: Like *cos*.
        variant: A key of `VARIANTS`.
        compute: The function of a backend, called with the row of `VARIANTS` and the arguments, once they are checked.

    Returns:
        *q* and *k* rotated, in their shapes; ``None`` for a *k* of ``None``. The dtype is what `Variant.back` says.

    Raises:
        ValueError: If the variant is unknown, or the tables are for fewer or more elements than it rotates.
    """
    return compute(check(q, k, cos, variant), q, k, cos, sin)


def check(q: Tensor, k: Tensor | None, cos: Tensor, variant: str) -> Variant:
    """Return the row of *variant*, or raise the `ValueError` that says what does not fit."""
    row = VARIANTS.get(variant)
    if row is None:
        raise ValueError(f"unknown RoPE variant {variant!r}; known: {', '.join(VARIANTS)}")
    rotated = row.width_rotated(cos)
    for name, x in (("q", q), ("k", k)):
        if x is not None and rotated != x.shape[-1] and (row.width == "whole" or rotated > x.shape[-1]):
            raise ValueError(
                f"variant {variant!r} with cos of {cos.shape[-1]} angles rotates {rotated} elements; "
                f"{name} has {x.shape[-1]} in its last dimension"
            )
    return row
