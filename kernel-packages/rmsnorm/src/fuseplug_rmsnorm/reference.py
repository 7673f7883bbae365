"""RMSNorm in plain PyTorch: one formula, and a table of the ways in which models round it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["VARIANTS", "Norming", "Variant", "add_rms_norm", "compute", "result_dtype", "rms_norm"]


@dataclass(frozen=True)
class Variant:
    """Where one variant casts, rounds, scales and gates. The defaults are Llama's.

    Two rows may describe the same function of real numbers and still be two variants: they round differently, in the
    values or only in the gradients (a tensor that is cast twice gets two gradients, each rounded before they are
    added).

    Attributes:
        name: Its key in `VARIANTS`.
        upcast: Compute in ``promote(x.dtype, float32)``; otherwise in the dtype of x throughout.
        casts: How often x is widened: ``"once"``; or ``"twice"``, for the mean square and again in the product.
        square: How x² is written: as a ``"power"``, which has one gradient; or as the ``"product"`` of x and x, which
            has two.
        root: How ``x / sqrt(mean_square + eps)`` is written: ``x * rsqrt``, ``x * pow(-0.5)``,
            ``x / sqrt``, or ``x * rsqrt`` with the factor first rounded to the dtype of x.
        weight: When the weight is multiplied: ``"after-cast"``, after the unit rows are cast to the dtype of x;
            ``"before-cast"``, in the wide dtype; ``"half-cast"``, after a cast to the *weight's* dtype if that is half;
            ``"first"``, with x itself, whose mean square is taken before; ``"input"``, with x itself, and the mean
            square is that of the rounded product.
        offset: The weight is ``1 + w``, added in the ``"wide"`` dtype or in the weight's ``"own"``.
        gate: A second input is activated and multiplied in, ``"before"`` the norm or ``"after"`` it.
        activation: The activation of the gate.
        native: Whether it is torch's own `rms_norm`, which autocast may widen as a whole.
    """

    upcast: bool = True
    casts: Literal["once", "twice"] = "once"
    square: Literal["power", "product"] = "power"
    root: Literal["rsqrt", "pow", "div", "rounded-rsqrt"] = "rsqrt"
    weight: Literal["after-cast", "before-cast", "half-cast", "first", "input"] = "after-cast"
    offset: Literal["wide", "own"] | None = None
    gate: Literal["before", "after"] | None = None
    activation: Literal["silu", "sigmoid"] = "silu"
    native: bool = False
    name: str = field(default="", compare=False)

    def is_cast(self, x: Tensor) -> bool:
        """Whether autocast now changes the result for *x*. It does not affect a variant that widens its input."""
        return (self.native or not self.upcast) and torch.is_autocast_enabled(x.device.type)


_ROWS = {
    "llama": Variant(),
    "cast-last": Variant(weight="before-cast"),
    "gemma": Variant(weight="before-cast", offset="wide"),
    "t5": Variant(casts="twice", weight="half-cast"),
    "cast-last-pow": Variant(weight="before-cast", root="pow"),
    "llama-twice-cast": Variant(casts="twice"),
    "gemma-own-offset": Variant(weight="before-cast", offset="own"),
    "gemma-input-scaled": Variant(weight="input", offset="own"),
    "cast-last-div": Variant(weight="before-cast", root="div"),
    "llama-product": Variant(square="product"),
    "cast-last-product": Variant(weight="before-cast", square="product"),
    "rounded-root": Variant(casts="twice", root="rounded-rsqrt"),
    "torch": Variant(weight="before-cast", native=True),
    "no-upcast": Variant(upcast=False),
    "no-upcast-div": Variant(upcast=False, root="div"),
    "no-upcast-product": Variant(upcast=False, square="product"),
    "no-upcast-weight-first": Variant(upcast=False, weight="first"),
    "gate-first": Variant(gate="before"),
    "gate-first-cast-last": Variant(gate="before", weight="before-cast"),
    "gated-silu": Variant(gate="after"),
    "gated-sigmoid": Variant(gate="after", activation="sigmoid"),
    "gated-silu-cast-last": Variant(gate="after", weight="before-cast"),
    "gated-sigmoid-cast-last": Variant(gate="after", weight="before-cast", activation="sigmoid"),
}
VARIANTS = {name: replace(row, name=name) for name, row in _ROWS.items()}
"""Every variant by name, the likely ones first."""

_HALF = (torch.float16, torch.bfloat16)


class Norming(NamedTuple):
    """The arguments of `rms_norm` that are not tensors, checked.

    Attributes:
        variant: The variant.
    """

    variant: Variant
    eps: float
    group_size: int | None

    @property
    def constants(self) -> tuple[str, float, int | None]:
        """The values that a program is compiled for."""
        return self.variant.name, float(self.eps), self.group_size

    @classmethod
    def of(cls, variant: str, eps: float, group_size: int | None) -> Norming:
        """The norming that has these `constants`."""
        return cls(VARIANTS[variant], eps, group_size)


def in_groups(tensor: Tensor, group_size: int | None) -> Tensor:
    """Cut the last dimension of *tensor* into ``(groups, group_size)``."""
    if group_size is None:
        return tensor
    return tensor.reshape(*tensor.shape[:-1], tensor.shape[-1] // group_size, group_size)


def unit(norming: Norming, x: Tensor, source: Tensor, weight: Tensor | None) -> Tensor:
    """Rows (or groups) of mean square one, from *source*: *x*, widened and perhaps gated or scaled.

    *x*, *source* and the result are ``(..., hidden)``, and the weight is ``(hidden,)``; all are floating.
    """
    variant, eps, group_size = norming
    grouped = in_groups(source, group_size)
    squares = grouped * grouped if variant.square == "product" else grouped.pow(2)
    mean_square = squares.mean(-1, keepdim=True) + eps
    if variant.casts == "twice":
        grouped = in_groups(x, group_size)
    if variant.weight == "first" and weight is not None:
        grouped = grouped * in_groups(weight, group_size)
    if variant.root == "div":
        y = grouped / torch.sqrt(mean_square)
    elif variant.root == "pow":
        y = grouped * torch.pow(mean_square, -0.5)
    elif variant.root == "rounded-rsqrt":
        y = grouped * torch.rsqrt(mean_square).to(x.dtype)
    else:
        y = grouped * torch.rsqrt(mean_square)
    return y if group_size is None else y.flatten(-2)


def compute(
    norming: Norming,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    unit: Callable[[Norming, Tensor, Tensor, Tensor | None], Tensor] = unit,
) -> Tensor:
    """`rms_norm` for checked arguments.

    Args:
        norming: The variant and the numbers.
        x: ``(..., hidden)``, floating.
        weight: ``(hidden,)``, floating, or ``None``.
        gate: Like *x*, or ``None``.
        unit: Another way to normalise, with the signature of `unit`.

    Returns:
        ``(..., hidden)``, in the dtype that `rms_norm` returns.
    """
    variant, eps, group_size = norming
    if variant.native and group_size is None and (weight is None or weight.dim() == 1):
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    wide = wide_dtype(x, variant)
    source = x.to(wide)
    if variant.gate == "before" and gate is not None:
        source = source * activate(gate.to(wide), variant)
    if variant.weight == "input" and weight is not None:
        source = (source * scale(weight, wide, variant)).to(x.dtype).to(wide)
    y = unit(norming, x, source, weight)
    # Without an upcast nothing is cast here, and under autocast y may have another dtype than x.
    y = _weigh(y, weight, x.dtype if variant.upcast else y.dtype, wide, variant)
    if variant.gate == "after" and gate is not None:
        y = y * activate(gate.to(wide), variant)
    return y.to(x.dtype) if variant.gate == "after" else y


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    variant: str = "llama",
    gate: Tensor | None = None,
    group_size: int | None = None,
    compute: Callable[[Norming, Tensor, Tensor | None, Tensor | None], Tensor] = compute,
) -> Tensor:
    """Root-mean-square normalisation over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    ``y = x / sqrt(mean(x²) + eps) * weight``, rounded exactly as *variant* rounds it, values and gradients.

    Args:
        x: ``(..., hidden)``, floating.
        weight: ``(hidden,)``, floating; ``None`` for a norm without one.
        eps: Added to the mean square before the root; may be 0.
        variant: A key of `VARIANTS`.
        gate: ``(..., hidden)`` like *x*; only for the gated variants, which compute without a gate if it is ``None``.
        group_size: The number of neighbours to normalise together; ``None`` for the whole last dimension.
        compute: The computation, for a `Norming` and checked tensors. A backend passes its own.

    Returns:
        ``(..., hidden)`` in the dtype of *x*; if the weight is multiplied after the cast or without one, in
        ``promote(x.dtype, weight.dtype)``; for ``"t5"`` with a half weight, in the weight's dtype.

    Raises:
        ValueError: If the variant is unknown, or a shape does not fit that of *x*.
    """
    row = check(x, weight, variant, gate, group_size)
    return compute(Norming(row, eps, group_size), x, weight, gate)


def check(x: Tensor, weight: Tensor | None, variant: str, gate: Tensor | None, group_size: int | None) -> Variant:
    """Return the row of *variant*, or raise the `ValueError` that says what does not fit."""
    row = VARIANTS.get(variant)
    if row is None:
        raise ValueError(f"unknown RMSNorm variant {variant!r}; known: {', '.join(VARIANTS)}")
    shape = x.shape  # reading it takes as long as all other lines here
    if not shape:
        raise ValueError("x must have at least one dimension, (..., hidden); it is a scalar")
    if weight is not None and weight.shape != shape[-1:]:
        raise ValueError(f"weight must have shape ({shape[-1]},), the last dimension of x; it has {(*weight.shape,)}")
    if gate is not None and row.gate is None:
        raise ValueError(f"variant {variant!r} takes no gate")
    if gate is not None and gate.shape != shape:
        raise ValueError(f"gate must have the shape of x, {(*shape,)}; it has {(*gate.shape,)}")
    if group_size is not None and (group_size < 1 or shape[-1] % group_size):
        raise ValueError(f"group_size must divide the last dimension of x, {shape[-1]}; it is {group_size}")
    return row


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    variant: str = "llama",
    norm: Callable[..., Tensor] = rms_norm,
) -> tuple[Tensor, Tensor]:
    """Add *residual* to *x*, and normalise the sum.

    Args:
        x: ``(..., hidden)``, floating.
        residual: Like *x*.
        weight: ``(hidden,)``, floating; ``None`` for a norm without one.
        eps: Added to the mean square before the root; may be 0.
        variant: A key of `VARIANTS`.
        norm: The function that computes `rms_norm`.

    Returns:
        ``rms_norm(x + residual, weight, eps, variant=variant)`` and ``x + residual``, both ``(..., hidden)``. The sum
        is in ``promote(x.dtype, residual.dtype)``, and is rounded to that dtype before it is normalised.

    Raises:
        ValueError: If the variant is unknown, or a shape does not fit that of *x*.
    """
    check_sum(x, residual, weight, variant)
    total = x + residual
    return norm(total, weight, eps, variant=variant), total


def check_sum(x: Tensor, residual: Tensor, weight: Tensor | None, variant: str) -> Variant:
    """Return the row of *variant*, or raise the `ValueError` that says what does not fit `add_rms_norm`."""
    row = check(x, weight, variant, None, None)
    if residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {(*x.shape,)}; it has {(*residual.shape,)}")
    return row


def _weigh(y: Tensor, weight: Tensor | None, narrow: torch.dtype, wide: torch.dtype, variant: Variant) -> Tensor:
    """Multiply by the weight and cast, in the order of the variant."""
    if weight is None or variant.weight == "input":
        return y.to(narrow)
    if variant.weight == "first":
        return y
    if variant.weight == "before-cast":
        y = y * scale(weight, wide, variant)
        return y if variant.gate == "after" else y.to(narrow)
    if variant.weight == "half-cast":
        return weight * (y.to(weight.dtype) if weight.dtype in _HALF else y)
    return weight * y.to(narrow)


def wide_dtype(x: Tensor, variant: Variant) -> torch.dtype:
    """The dtype that the variant computes in."""
    return torch.promote_types(x.dtype, torch.float32) if variant.upcast else x.dtype


def result_dtype(x: Tensor, weight: Tensor | None, variant: Variant) -> torch.dtype:
    """The dtype that the variant returns."""
    if weight is None or variant.gate == "after" or variant.weight in ("before-cast", "input"):
        return x.dtype
    if variant.weight == "half-cast" and weight.dtype in _HALF:
        return weight.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def scale(weight: Tensor, wide: torch.dtype, variant: Variant) -> Tensor:
    """The factor of unit rows: the weight ``(hidden,)`` in the dtype *wide*, with the variant's offset."""
    if variant.offset == "own":
        return (1.0 + weight).to(wide)
    return 1.0 + weight.to(wide) if variant.offset == "wide" else weight.to(wide)


def activate(gate: Tensor, variant: Variant) -> Tensor:
    """The activated gate, in the shape and dtype of *gate*."""
    return functional.silu(gate) if variant.activation == "silu" else torch.sigmoid(gate)
