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
"""A function of rows that treats all alike."""

GateUpLayout = Literal["concatenated", "interleaved", "ungated"]


@dataclass(frozen=True)
class Gate:
    """How an expert goes from its first projection to its second.

    Attributes:
        activation: A key of `fuseplug_backends.activations.ACTIVATIONS`: of the gate, or of the only projection.
        clamp: What is kept below ``limit``, and up between ``±limit``: the gate ``"before"`` its activation, or the
            activation ``"after"`` it.
        offset: Added to up before the product.
    """

    activation: str
    clamp: Literal["before", "after"] | None = None
    offset: float = 0.0

    @property
    def row(self) -> Activation:
        """The row of the activation."""
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
"""Every gate by name, the likely ones first. Those that clamp need a ``limit``."""


class Order(NamedTuple):
    """The (token, expert) pairs, called slots, sorted by expert.

    Attributes:
        slots: ``(pairs,)`` integers, the slot of each sorted row.
        rows: ``(pairs,)`` integers, the sorted row of each slot.
        ends: ``(experts,)`` integers, where the rows of each expert end; those after the last belong to none.
        experts: ``(pairs,)`` integers, the expert of each sorted row; any for those of none.
    """

    slots: Tensor
    rows: Tensor
    ends: Tensor
    experts: Tensor


class Experts(NamedTuple):
    """The arguments of `moe` that say what the experts are, checked."""

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
        """That of the first projection, in which the experts compute."""
        return first(self.gate_up).dtype

    @property
    def stacked(self) -> list[Tensor]:
        """Those that are one tensor for all experts."""
        all_of_them = (self.gate_up, self.up, self.down, self.gate_up_bias, self.down_bias)
        return [tensor for tensor in all_of_them if isinstance(tensor, Tensor)]


def outside_autocast(compute: Callable[..., Tensor], experts: Experts, x: Tensor, *others: Any) -> Tensor:
    """``compute(experts, x, *others)``, in the dtype of the experts whatever the ambient autocast."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return compute(experts, x, *others)
    return compute(experts, x, *others)


def first(projection: Projection) -> Tensor:
    """One of its tensors."""
    return projection if isinstance(projection, Tensor) else projection[0]


def tensors_of(projection: Projection | None) -> Sequence[Tensor]:
    """All of them: one, or one for each expert."""
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
    """Sort the slots of ``(tokens, k)`` by expert, those of one expert as the tokens come, those elsewhere last."""
    flat = top_k_index.reshape(-1).long()
    experts, slots = torch.sort(flat.masked_fill(flat < 0, number), stable=True)
    ends = torch.searchsorted(experts, torch.arange(number, device=flat.device, dtype=experts.dtype), right=True)
    return Order(slots, torch.argsort(slots), ends, experts.clamp(max=number - 1))


def linear(
    rows: Tensor, projection: Projection, order: Order, bias: Tensor | None = None, *, transposed: bool, skip: bool
) -> Tensor:
    """Every expert's rows times its matrix, and its bias added; rows of none become zero before the bias.

    Args:
        rows: ``(pairs, in)``, sorted by expert, in the dtype of *projection*.
        projection: ``(experts, out, in)``.
        order: The order of the slots.
        bias: ``(experts, out)``, or ``None``.
        transposed: The last two dimensions of *projection* are the other way round.
        skip: Matrices of a sequence that no row is multiplied by have no gradient; otherwise theirs is zero.

    Returns:
        ``(pairs, out)``.
    """
    if isinstance(projection, Tensor):
        out = grouped_linear.linear(rows, projection if transposed else projection.mT, order.ends)
    else:
        out = grouped_linear.walk(rows, [w if transposed else w.t() for w in projection], order.ends, skip=skip)
    return out if bias is None else out + bias[order.experts]


def gated(experts: Experts, gate: Tensor, up: Tensor | None) -> Tensor:
    """What goes into the second projection, ``(pairs, inner)``, from the result of the first, as for `apply_gate`."""
    if not isinstance(experts.activation, str):
        return experts.activation(gate if up is None else torch.cat((gate, up), dim=-1))
    return apply_gate(gate, up, experts.activation, experts.layout, experts.limit, experts.alpha)


def apply_gate(gate: Tensor, up: Tensor | None, name: str, layout: str, limit: float | None, alpha: float) -> Tensor:
    """A row of `GATES`: tensors first, then what a compiler compiles in.

    Args:
        gate: ``(..., inner)``, floating; without *up*, and with a gate at all, ``(..., 2 · inner)``, gate and up.
        up: ``(..., inner)`` in the dtype of *gate*, or ``None``.
        name: A key of `GATES`.
        layout: How gate and up share *gate*, as for `moe`.
        limit: Where a gate clamps.
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

    *weights* is ``(tokens, k)``; the result ``(tokens, hidden)`` has the dtype that both promote to.
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
    """A sparsely gated mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), the routing done before.

    ``y[t] = Σᵢ top_k_weights[t, i] · expert[top_k_index[t, i]](x[t])`` where ``expert(x) = act(x·G) ∘ (x·U) · D``. Each
    step is rounded to the dtype of the experts, the products with the weights and their sum to
    ``promote(experts, top_k_weights)``, the result to the dtype of *x*.

    Args:
        x: ``(tokens, hidden)``, floating.
        top_k_index: ``(tokens, k)``, integers from 0. One that is negative, or not below the number of experts,
            stands for an expert that is elsewhere, and adds nothing. Where the indices are read on the host (CPU), a
            negative one raises `IndexError`.
        top_k_weights: ``(tokens, k)``, floating.
        gate_up: ``(experts, 2 · inner, hidden)``; for ``layout="ungated"``, or beside *up*, ``(experts, inner,
            hidden)``.
            Instead of one tensor it may be a sequence of matrices, and so may the others.
        down: ``(experts, hidden, inner)``.
        up: ``(experts, inner, hidden)``, where it is apart from the gate.
        gate_up_bias: ``(experts, 2 · inner)``.
        down_bias: ``(experts, hidden)``.
        transposed: The last two dimensions of all projections are the other way round.
        layout: How gate and up share *gate_up*: first half and second half; even and odd columns; no gate.
        activation: A key of `GATES`, or a function of the rows ``(pairs, 2 · inner)`` of *gate_up* that gives
            ``(pairs, inner)``.
        limit: Where a gate clamps.
        alpha: The slope of ``"swish-clamp-before-offset"``.
        post: A function of the rows of all experts before they are weighted, a norm for example.
        idle: For sequences, whether the gradient of an expert without tokens is zero or ``None``.
        compute: What is given the tensors once they are checked, and the `Experts`: that of a backend.

    Returns:
        ``(tokens, hidden)`` in the dtype of *x*.

    Raises:
        ValueError: If the activation or layout is unknown, or a shape does not fit the others.
        TypeError: If *x* is not floating, or *top_k_index* not of integers.
    """
    tensors = (gate_up, up, down, gate_up_bias, down_bias)
    experts = Experts(len(gate_up), *tensors, transposed, layout, activation, limit, alpha, post, idle)
    check(experts, x, top_k_index, top_k_weights)
    return compute(experts, x, top_k_index, top_k_weights)


def check(experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    """Raise the error that says what does not fit, if something does not."""
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
        # Sequences are of modules that are alike: the first one speaks for all, or a call would wait for the check.
        if number != experts.number or first(projection).shape[-2:] != shape:
            actual = [number, *first(projection).shape[-2:]]
            raise ValueError(f"{name} must be {[experts.number, *shape]}, to fit x and down; it is {actual}")
    for name, width in (("gate_up_bias", halves * inner), ("down_bias", hidden)):
        bias = cast("Tensor | None", getattr(experts, name))
        if bias is not None and bias.shape != (experts.number, width):
            raise ValueError(f"{name} must be {[experts.number, width]}; it is {[*bias.shape]}")
