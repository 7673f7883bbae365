"""How stacked experts are called, with the weights that their module holds at the time of the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug import Adapter, Compute

from ...reference import GateUpLayout
from ..calls import PLAIN, passed
from ..gates import OWN, own_gate
from ..indices import PARALLEL, names_experts


@dataclass(frozen=True)
class StackedParts:
    """The parts that were found in a module, by attribute names.

    Attributes:
        gate_up: The first projection.
        down: The second projection.
        transposed: Whether matrices are (in, out).
        halves: 2 where gate and up share the first projection, 1 where there is no gate.
        weights_first: Whether the forward takes the routing weights before the indices.
        dense: Whether the forward takes a weight for every expert, rather than for each chosen one.
        post: The child that is called on the rows of all experts before they are weighted.
        passing: Whether the first projection has more experts than the second: the surplus ones return their rows.
        count: Name of the number of experts.
        gate_up_bias: The bias of the first projection.
        down_bias: The bias of the second projection.
    """

    gate_up: str
    down: str
    transposed: bool
    halves: int
    weights_first: bool
    dense: bool
    post: str | None
    passing: bool
    count: str | None
    gate_up_bias: str | None = None
    down_bias: str | None = None


@dataclass(frozen=True)
class StackedAdapter(Adapter):
    """Calls the experts with the weights that the module holds at the time of the call.

    Attributes:
        variant: The gate, and how the weights are laid out.
        parts: Where the weights are.
        activation: A key of `GATES`, or `OWN`.
        layout: How gate and up share the first projection.
        limit: Name of the number at which the gate clamps.
        alpha: Name of the slope of the gate's sigmoid.
        keeps_eval: Whether the original computes calls in eval mode with gradients. If it computes every expert for
            every token then, weights of zero have gradients, too.
    """

    variant: str
    parts: StackedParts
    activation: str
    layout: GateUpLayout
    limit: str | None
    alpha: str | None
    keeps_eval: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The weights, their number, the limit and the slope; and the gate, where the module's own is called."""
        parts = self.parts
        weights = (parts.gate_up, parts.down, parts.gate_up_bias, parts.down_bias)
        names = (*weights, parts.count, PARALLEL, self.limit, self.alpha)
        gate = ("_apply_gate",) if self.activation == OWN and self.layout != "ungated" else ()
        return (*(name for name in names if name is not None), *gate)

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states, top_k_index, top_k_weights)``, in the module's order of arguments.

        ``hidden_states`` is ``(..., hidden)``, floating; the others are ``(tokens, k)``, integers and floating, or for
        *dense* weights ``(tokens, experts)``. The result has the shape and dtype of ``hidden_states``. Errors are those
        of `reference.moe`.
        """
        parts, adapter = self.parts, self

        def forward(module: nn.Module, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Any:
            gate_up, down = getattr(module, parts.gate_up), getattr(module, parts.down)
            # A DTensor, or a tensor that a quantizer put there, has operations of its own, which the module knows how
            # to call.
            if (
                type(gate_up) not in PLAIN
                or type(down) not in PLAIN
                or (adapter.keeps_eval and not module.training and torch.is_grad_enabled())
                or (parts.count is not None and getattr(module, parts.count) != len(down))
                or not names_experts(module, weights if parts.weights_first else index, len(gate_up))
            ):
                return NotImplemented
            if parts.weights_first:
                index, weights = weights, index
            if parts.dense:
                weights = weights.gather(1, index.clamp(max=len(gate_up) - 1))
            x = hidden_states if hidden_states.dim() == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
            y = compute(
                x,
                index,
                weights,
                gate_up[: len(down)] if parts.passing else gate_up,
                down,
                gate_up_bias=None if parts.gate_up_bias is None else getattr(module, parts.gate_up_bias),
                down_bias=None if parts.down_bias is None else getattr(module, parts.down_bias),
                transposed=parts.transposed,
                layout=adapter.layout,
                activation=own_gate(module, adapter.layout) if adapter.activation == OWN else adapter.activation,
                limit=None if adapter.limit is None else getattr(module, adapter.limit),
                alpha=1.702 if adapter.alpha is None else getattr(module, adapter.alpha),
                post=None if parts.post is None else getattr(module, parts.post),
            )
            if parts.passing:
                y = y + passed(range(len(down), len(gate_up)), x, index, weights)
            return y.view(hidden_states.shape)

        return forward
