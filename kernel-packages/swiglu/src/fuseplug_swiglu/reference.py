"""The gating between the projections of an MLP, in plain PyTorch, with a table of the ways to gate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug_backends.activations import ACTIVATIONS

__all__ = ["Gating", "compute", "separated", "swiglu"]

LAYOUTS = ("gate-first", "gate-second", "interleaved")
"""The places of the gate in the output of one projection that gives both gate and up."""


@dataclass(frozen=True)
class Variant:
    """What one variant does besides ``activation(gate) * up``.

    Attributes:
        wide: Compute in ``promote(gate.dtype, float32)`` and cast back; otherwise in the dtype of the gate throughout.
        scaled: The gate is first multiplied by ``scale``.
        sparse: Each row of the gate is reduced to its excess over a quantile; see `sparsify`.
        clamp: Up is clamped to ±limit, and the gate is clamped from above, ``"before"`` its activation or ``"after"``.
        offset: Up is replaced by ``1 + up``.
        name: Its key in `VARIANTS`.
        needs: The numbers that the variant needs.
        simple: Whether the variant does nothing besides.
    """

    wide: bool = False
    scaled: bool = False
    sparse: bool = False
    clamp: Literal["before", "after"] | None = None
    offset: bool = False
    name: str = field(default="", compare=False)

    # Computed once: for one token, computing them at each use would take as long as the activation.
    needs: frozenset[str] = field(init=False)
    simple: bool = field(init=False)

    def __post_init__(self) -> None:
        wanted = {"limit": self.clamp is not None, "scale": self.scaled, "sparsity": self.sparse}
        needs = frozenset(name for name, needed in wanted.items() if needed)
        object.__setattr__(self, "needs", needs)
        object.__setattr__(self, "simple", not (needs or self.wide or self.offset))


_ROWS = {
    "plain": Variant(),
    "wide": Variant(wide=True),
    "scaled": Variant(scaled=True),
    "sparse": Variant(sparse=True),
    "clamp-before": Variant(clamp="before"),
    "clamp-after": Variant(clamp="after"),
    "clamp-before-offset": Variant(clamp="before", offset=True),
}
VARIANTS = {name: replace(row, name=name) for name, row in _ROWS.items()}
"""Every variant by name, the likely ones first."""


class Gating(NamedTuple):
    """The arguments of `swiglu` that are not tensors, checked.

    Attributes:
        variant: The variant.
    """

    variant: Variant
    activation: str
    layout: str
    limit: float | None
    scale: float | None
    sparsity: float | None
    beta: float

    def is_cast(self, gate: Tensor) -> bool:
        """Whether autocast now changes the result for *gate*: it widens some activations."""
        return ACTIVATIONS[self.activation].autocast and torch.is_autocast_enabled(gate.device.type)

    @property
    def constants(self) -> tuple[Any, ...]:
        """The names and numbers that a program is compiled for. No program is compiled for the sparsity."""
        return self.activation, self.variant.name, self.layout, self.limit, self.scale, self.beta

    @classmethod
    def of(cls, constants: tuple[Any, ...]) -> Gating:
        """The gating that has these `constants`."""
        activation, variant, layout, limit, scale, beta = constants
        return cls(VARIANTS[variant], activation, layout, limit, scale, None, beta)


def split(gate_up: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The gate and up, ``(..., intermediate)`` each, as views of *gate_up*, ``(..., 2 * intermediate)``."""
    if layout == "interleaved":
        return gate_up[..., ::2], gate_up[..., 1::2]
    first, second = gate_up.chunk(2, dim=-1)
    return (first, second) if layout == "gate-first" else (second, first)


def separated(gating: Gating, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gate and up, ``(..., intermediate)`` each; views of *gate* if it holds both."""
    return (gate, up) if up is not None else split(gate, gating.layout)


def sparsify(gate: Tensor, sparsity: float, device: torch.device | str | None = None) -> Tensor:
    """The excess of each row of *gate* over its quantile *sparsity*, as of a normal distribution; zero elsewhere.

    The statistical top-k of Spark Transformer (You et al. 2025, arXiv:2506.06644).

    Args:
        gate: ``(..., intermediate)``, floating.
        sparsity: Between 0 and 1.
        device: The device to compute the one number on that depends on *sparsity*; by default, that of *gate*.

    Returns:
        A tensor like *gate*.
    """
    # In float32 whatever the dtype of the gate, and then rounded, as in the models that do this.
    share = torch.tensor(sparsity, dtype=torch.float32, device=device or gate.device)
    deviations = (torch.erfinv(2.0 * share - 1.0) * math.sqrt(2.0)).to(gate.dtype)
    mean = torch.mean(gate, dim=-1, keepdim=True)
    deviation = torch.std(gate, dim=-1, keepdim=True, unbiased=False)
    return functional.relu(gate - (mean + deviation * deviations))


def sparsified(
    gating: Gating, gate: Tensor, up: Tensor | None, device: torch.device | str | None = None
) -> tuple[Gating, Tensor, Tensor]:
    """Sparsify the gate; return the plain gating that is left to do, gate and up. *device* is as for `sparsify`.

    This step is not fused, so that it keeps exactly the elements that the original keeps: the mean and the deviation of
    a row are rounded on the way.
    """
    gate, up = separated(gating, gate, up)
    gate = sparsify(gate, gating.sparsity, device) if gating.sparsity else gate
    return gating._replace(variant=VARIANTS["plain"], sparsity=None), gate, up


def compute(gating: Gating, gate: Tensor, up: Tensor | None) -> Tensor:
    """`swiglu` for checked arguments.

    Args:
        gating: The variant, the activation and the numbers.
        gate: ``(..., intermediate)``, floating; without *up* ``(..., 2 * intermediate)``, gate and up.
        up: ``(..., intermediate)``, floating, or ``None``.

    Returns:
        ``(..., intermediate)``, in the dtype that `swiglu` returns.
    """
    variant, limit = gating.variant, gating.limit
    gate, up = separated(gating, gate, up)
    narrow = gate.dtype
    if variant.wide:
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
        up = up.to(torch.promote_types(up.dtype, torch.float32))
    if gating.scale is not None:
        gate = gate * gating.scale
    if gating.sparsity:
        gate = sparsify(gate, gating.sparsity)
    if variant.clamp == "before":
        gate = gate.clamp(max=limit)
    gate = ACTIVATIONS[gating.activation].function(gate, gating.beta)
    if variant.clamp == "after":
        gate = gate.clamp(max=limit)
    if variant.clamp is not None and limit is not None:
        up = up.clamp(min=-limit, max=limit)
    y = (up + 1.0 if variant.offset else up) * gate
    return y.to(narrow) if variant.wide else y


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: str = "silu",
    variant: str = "plain",
    layout: str = "gate-first",
    limit: float | None = None,
    scale: float | None = None,
    sparsity: float | None = None,
    beta: float = 1.0,
    compute: Callable[[Gating, Tensor, Tensor | None], Tensor] = compute,
) -> Tensor:
    """The gated linear unit between the projections of an MLP (Shazeer 2020, arXiv:2002.05202).

    ``y = activation(gate) * up``, rounded exactly as *variant* rounds it, values and gradients. SwiGLU has the
    activation ``"silu"``, GeGLU ``"gelu"``, ReGLU ``"relu"``, and the first GLU (Dauphin et al. 2016, arXiv:1612.08083)
    ``"sigmoid"``.

    Args:
        gate: ``(..., intermediate)``, floating. Without *up*: ``(..., 2 * intermediate)``, gate and up in one tensor,
            as one projection gives them. They are then read where they are, and their gradient is one tensor.
        up: ``(..., intermediate)`` like *gate*, or ``None``.
        activation: A key of `fuseplug_backends.activations.ACTIVATIONS`.
        variant: A key of `VARIANTS`.
        layout: The place of the gate in *gate* if this holds both: one of `LAYOUTS`.
        limit: For the clamped variants; may be infinite.
        scale: For ``"scaled"``.
        sparsity: For ``"sparse"``: the share of a normally distributed row that becomes zero; 0 for none.
        beta: For ``"swish"``: β in ``x * sigmoid(beta * x)`` (Ramachandran et al. 2017, arXiv:1710.05941).
        compute: The computation, for a `Gating` and checked tensors. A backend passes its own.

    Returns:
        ``(..., intermediate)`` in ``promote(gate.dtype, up.dtype)``; for ``"wide"`` in the dtype of the gate.

    Raises:
        ValueError: If a name is unknown, the variant needs a number that is missing or takes none that is given, or a
            shape does not fit.
    """
    row = check(gate, up, activation, variant, layout, limit=limit, scale=scale, sparsity=sparsity)
    return compute(Gating(row, activation, layout, limit, scale, sparsity, beta), gate, up)


def check(
    gate: Tensor, up: Tensor | None, activation: str, variant: str, layout: str, **numbers: float | None
) -> Variant:
    """Return the row of *variant*, or raise the `ValueError` that says what does not fit."""
    row = VARIANTS.get(variant)
    if row is None:
        raise ValueError(f"unknown variant of a gated MLP {variant!r}; known: {', '.join(VARIANTS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    if up is not None:
        if up.shape != gate.shape:
            raise ValueError(f"up must have the shape of gate, {(*gate.shape,)}; it has {(*up.shape,)}")
    elif layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    elif not gate.dim() or gate.shape[-1] % 2:
        raise ValueError(f"without up, gate must be (..., 2 * intermediate); it has {(*gate.shape,)}")
    for name, value in numbers.items():
        if (value is not None) != (name in row.needs):
            raise ValueError(f"variant {variant!r} {'takes no' if value is not None else 'needs a'} {name}")
    return row
