"""What a mixture of experts computes, in plain PyTorch: one walk over the experts, and a table of their gates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from fuseplug_backends.activations import ACTIVATIONS, Activation

from . import grouped_linear

__all__ = ["Experts", "compute", "moe", "outside_autocast"]

Projection = Tensor | Sequence[Tensor]
"""The matrices of all experts: stacked in one tensor, or one by one."""

RowFunction = Callable[[Tensor], Tensor]
"""A function of rows that treats all rows alike."""

GateUpLayout = Literal["concatenated", "interleaved", "ungated"]


@dataclass(frozen=True)
class Gate:
    """What an expert computes between its first projection and its second.

    Attributes:
        activation: A key of `fuseplug_backends.activations.ACTIVATIONS`, for the gate or the only projection.
        clamp: Whether the gate is kept below ``limit`` ``"before"`` its activation, or the activated gate ``"after"``
            it. In both cases up is kept between ``±limit``.
        offset: The number that is added to up before the product.
    """

    activation: str
    clamp: Literal["before", "after"] | None = None
    offset: float = 0.0

    @property
    def row(self) -> Activation:
        """The row of `ACTIVATIONS`."""
        return ACTIVATIONS[self.activation]


GATES: dict[str, Gate] = {
    "silu": Gate("silu"),
    "gelu_tanh": Gate("gelu_tanh"),
    "gelu": Gate("gelu"),
    "relu": Gate("relu"),
    "relu2": Gate("relu2"),
    "swish-clamp-before-offset": Gate("swish", clamp="before", offset=1.0),
    "silu-clamp-before": Gate("silu", clamp="before"),
    "silu-clamp-after": Gate("silu", clamp="after"),
}
"""Every gate by name, the likely ones first. Gates that clamp need a ``limit``."""


class Order(NamedTuple):
    """The (token, expert) pairs, called slots, sorted by expert.

    Attributes:
        slots: ``(pairs,)`` integers, the slot of each sorted row.
        rows: ``(pairs,)`` integers, the sorted row of each slot.
        ends: ``(experts,)`` integers, where the rows of each expert end; rows after the last end belong to none.
        experts: ``(pairs,)`` integers, the expert of each sorted row; any expert for rows that belong to none.
    """

    slots: Tensor
    rows: Tensor
    ends: Tensor
    experts: Tensor


class Experts(NamedTuple):
    """The arguments of `moe` that describe the experts, once they are checked."""

    number: int
    gate_up: Projection
    up: Projection | None
    down: Projection
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    transposed: bool
    layout: GateUpLayout
    activation: str | RowFunction
    limit: float | None
    alpha: float
    post: RowFunction | None
    idle: Literal["zero", "none"]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first projection, in which the experts compute."""
        return first(self.gate_up).dtype

    @property
    def stacked(self) -> list[Tensor]:
        """The projections and biases that are one tensor for all experts."""
        all_of_them = (self.gate_up, self.up, self.down, self.gate_up_bias, self.down_bias)
        return [tensor for tensor in all_of_them if isinstance(tensor, Tensor)]


def outside_autocast(compute: Callable[..., Tensor], experts: Experts, x: Tensor, *others: Any) -> Tensor:
    """``compute(experts, x, *others)`` in the dtype of the experts, whatever the ambient autocast."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return compute(experts, x, *others)
    return compute(experts, x, *others)


def first(projection: Projection) -> Tensor:
    """One of the tensors of *projection*."""
    return projection if isinstance(projection, Tensor) else projection[0]


def tensors_of(projection: Projection | None) -> Sequence[Tensor]:
    """All tensors of *projection*: one, or one for each expert."""
    return () if projection is None else (projection,) if isinstance(projection, Tensor) else projection


def projection_of(tensors: Sequence[Tensor]) -> Projection:
    """The inverse of `tensors_of`."""
    return tensors[0] if tensors[0].dim() == 3 else tensors


def compute(experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`moe` for arguments that were checked.

    Args:
        experts: Weights, layout, gate and numbers.
        x: ``(tokens, hidden)``, floating.
        top_k_index: ``(tokens, k)``, integers from 0.
        top_k_weights: ``(tokens, k)``, floating.

    Returns:
        ``(tokens, hidden)`` in the dtype of *x*.
    """
    elsewhere = (top_k_index < 0) | (top_k_index >= experts.number)
    order = sort(top_k_index, experts.number)
    rows = x.to(experts.dtype)[order.slots // top_k_index.shape[1]]
    project = functools.partial(linear, transposed=experts.transposed, skip=experts.idle == "none")
    up = None if experts.up is None else project(rows, experts.up, order)
    inner = gated(experts, project(rows, experts.gate_up, order, experts.gate_up_bias), up)
    out = project(inner.to(first(experts.down).dtype), experts.down, order, experts.down_bias)
    if experts.post is not None:
        out = experts.post(out)
    slots = out[order.rows].view(*top_k_index.shape, out.shape[-1])
    return weigh(slots.masked_fill(elsewhere[..., None], 0), top_k_weights.masked_fill(elsewhere, 0)).to(x.dtype)


def sort(top_k_index: Tensor, number: int) -> Order:
    """Sort the slots of ``(tokens, k)`` by expert, those of one expert by token, those of experts elsewhere last."""
    flat = top_k_index.reshape(-1).long()
    experts, slots = torch.sort(flat.masked_fill(flat < 0, number), stable=True)
    ends = torch.searchsorted(experts, torch.arange(number, device=flat.device, dtype=experts.dtype), right=True)
    return Order(slots, torch.argsort(slots), ends, experts.clamp(max=number - 1))


def linear(
    rows: Tensor, projection: Projection, order: Order, bias: Tensor | None = None, *, transposed: bool, skip: bool
) -> Tensor:
    """Each expert's rows times its matrix, plus its bias; rows of no expert become zero before the bias.

    Args:
        rows: ``(pairs, in)``, sorted by expert, in the dtype of *projection*.
        projection: ``(experts, out, in)``.
        order: The order of the slots.
        bias: ``(experts, out)``, or ``None``.
        transposed: Whether the last two dimensions of *projection* are swapped.
        skip: Whether matrices of a sequence that multiply no row have no gradient; otherwise it is zero.

    Returns:
        ``(pairs, out)``.
    """
    if isinstance(projection, Tensor):
        out = grouped_linear.linear(rows, projection if transposed else projection.mT, order.ends)
    else:
        out = grouped_linear.walk(rows, [w if transposed else w.t() for w in projection], order.ends, skip=skip)
    return out if bias is None else out + bias[order.experts]


def gated(experts: Experts, gate: Tensor, up: Tensor | None) -> Tensor:
    """The input of the second projection, ``(pairs, inner)``, from the result of the first, as for `apply_gate`."""
    if not isinstance(experts.activation, str):
        return experts.activation(gate if up is None else torch.cat((gate, up), dim=-1))
    return apply_gate(gate, up, experts.activation, experts.layout, experts.limit, experts.alpha)


def apply_gate(gate: Tensor, up: Tensor | None, name: str, layout: str, limit: float | None, alpha: float) -> Tensor:
    """Apply a row of `GATES`. Tensors come first, then the constants that a compiler compiles in.

    Args:
        gate: ``(..., inner)``, floating; if there is a gate but no *up*, ``(..., 2 · inner)``, gate and up.
        up: ``(..., inner)`` in the dtype of *gate*, or ``None``.
        name: A key of `GATES`.
        layout: How gate and up share *gate*, as for `moe`.
        limit: Where the gate clamps, if it does.
        alpha: The slope of ``"swish-clamp-before-offset"``.

    Returns:
        ``(..., inner)`` in the dtype of *gate*.
    """
    gate_row = GATES[name]
    if up is None and layout == "concatenated":
        gate, up = gate.chunk(2, dim=-1)
    elif up is None and layout == "interleaved":
        gate, up = gate[..., ::2], gate[..., 1::2]
    if gate_row.clamp == "before":
        gate = gate.clamp(max=limit)
    activated = gate_row.row.function(gate, alpha)
    if gate_row.clamp == "after":
        activated = activated.clamp(max=limit)
    if up is None:
        return activated
    if gate_row.clamp is not None and limit is not None:
        up = up.clamp(min=-limit, max=limit)
    return activated * (up + gate_row.offset if gate_row.offset else up)


def weigh(slots: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over the second dimension of ``(tokens, k, hidden)``, always in the same order.

    *weights* is ``(tokens, k)``. The result, ``(tokens, hidden)``, has the dtype that both promote to.
    """
    return (slots * weights[..., None]).sum(1)


def moe(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Projection,
    down: Projection,
    *,
    up: Projection | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    layout: GateUpLayout = "concatenated",
    activation: str | RowFunction = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    post: RowFunction | None = None,
    idle: Literal["zero", "none"] = "zero",
    compute: Callable[[Experts, Tensor, Tensor, Tensor], Tensor] = compute,
) -> Tensor:
    """A sparsely gated mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), applied after the routing.

    ``y[t] = Σᵢ top_k_weights[t, i] · expert[top_k_index[t, i]](x[t])`` where ``expert(x) = act(x·G) ∘ (x·U) · D``. Each
    step is rounded to the dtype of the experts, the products with the weights and their sum to
    ``promote(experts, top_k_weights)``, the result to the dtype of *x*.

    Args:
        x: ``(tokens, hidden)``, floating.
        top_k_index: ``(tokens, k)``, integers from 0. An index that is negative, or not below the number of experts,
            stands for an expert elsewhere, and adds nothing. Where the indices are read on the host (CPU), a negative
            index raises `IndexError`.
        top_k_weights: ``(tokens, k)``, floating.
        gate_up: ``(experts, 2 · inner, hidden)``; for ``layout="ungated"``, or beside *up*, ``(experts, inner,
            hidden)``. Each projection may be a sequence of matrices instead of one tensor.
        down: ``(experts, hidden, inner)``.
        up: ``(experts, inner, hidden)``, if up is separate from the gate.
        gate_up_bias: ``(experts, 2 · inner)``.
        down_bias: ``(experts, hidden)``.
        transposed: Whether the last two dimensions of all projections are swapped.
        layout: How gate and up share *gate_up*: first half and second half; even and odd columns; no gate.
        activation: A key of `GATES`, or a function of the rows ``(pairs, 2 · inner)`` of *gate_up* that gives
            ``(pairs, inner)``.
        limit: Where the gate clamps, if it does.
        alpha: The slope of ``"swish-clamp-before-offset"``.
        post: A function of the rows of all experts before they are weighted, a norm for example.
        idle: For sequences, whether the gradient of an expert without tokens is zero or ``None``.
        compute: The function of a backend, called with the `Experts` and the other tensors once they are checked.

    Returns:
        ``(tokens, hidden)`` in the dtype of *x*.

    Raises:
        ValueError: If the activation or layout is unknown, or a shape does not fit the others.
        TypeError: If *x* is not a floating matrix, or *top_k_index* is not a matrix of integers with a row for each
            token.
    """
    tensors = (gate_up, up, down, gate_up_bias, down_bias)
    experts = Experts(len(gate_up), *tensors, transposed, layout, activation, limit, alpha, post, idle)
    check(experts, x, top_k_index, top_k_weights)
    return compute(experts, x, top_k_index, top_k_weights)


def check(experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    """Raise an error that says what does not fit, if anything does not."""
    if x.dim() != 2 or not x.is_floating_point():
        raise TypeError(f"x must be floating, (tokens, hidden); it is {x.dtype}{[*x.shape]}")
    if top_k_index.dim() != 2 or top_k_index.is_floating_point() or len(top_k_index) != len(x):
        wanted = f"integers ({len(x)}, k), a row for each token"
        raise TypeError(f"top_k_index must be {wanted}; it is {top_k_index.dtype}{[*top_k_index.shape]}")
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights must have the shape of top_k_index, {[*top_k_index.shape]}; it has {[*top_k_weights.shape]}"
        )
    if isinstance(experts.activation, str):
        gate = GATES.get(experts.activation)
        if gate is None:
            raise ValueError(f"unknown activation {experts.activation!r}; known: {', '.join(GATES)}")
        if gate.clamp is not None and experts.limit is None:
            raise ValueError(f"activation {experts.activation!r} clamps: give it a limit")
    if experts.layout not in ("concatenated", "interleaved", "ungated"):
        raise ValueError(f"layout must be concatenated, interleaved or ungated; it is {experts.layout!r}")
    _check_shapes(experts, x.shape[1])


def _check_shapes(experts: Experts, hidden: int) -> None:
    inner = first(experts.down).shape[-2 if experts.transposed else -1]
    halves = 1 if experts.layout == "ungated" or experts.up is not None else 2
    wanted = {"gate_up": (halves * inner, hidden), "down": (hidden, inner), "up": (inner, hidden)}
    for name, shape in wanted.items():
        projection = cast("Projection | None", getattr(experts, name))
        if projection is None:
            continue
        shape = shape[::-1] if experts.transposed else shape
        number = len(projection)
        # A sequence is of modules that are alike: its first matrix stands for all, so that no call waits for the check.
        if number != experts.number or first(projection).shape[-2:] != shape:
            actual = [number, *first(projection).shape[-2:]]
            raise ValueError(f"{name} must be {[experts.number, *shape]}, to fit x and down; it is {actual}")
    for name, width in (("gate_up_bias", halves * inner), ("down_bias", hidden)):
        bias = cast("Tensor | None", getattr(experts, name))
        if bias is not None and bias.shape != (experts.number, width):
            raise ValueError(f"{name} must be {[experts.number, width]}; it is {[*bias.shape]}")
