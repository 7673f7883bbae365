"""How blocks with a list of experts are called: with the weights of all experts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuseplug import Adapter, Compute

from ...reference import GateUpLayout
from ..calls import PLAIN, is_the_originals, narrowed
from ..gates import to_call

Idle = Literal["zero", "none"]


@dataclass(frozen=True)
class ListedExperts:
    """The experts of a block, by attribute names.

    Attributes:
        experts: The list.
        gate: The gate projection of each expert, or the only projection before the activation.
        up: The up projection of each.
        down: The down projection of each.
        activation: A key of `fuseplug_moe.reference.GATES`, or `OWN`.
    """

    experts: str
    gate: str
    up: str | None
    down: str
    activation: str

    @property
    def layout(self) -> GateUpLayout:
        """As in `fuseplug_moe.reference.moe`."""
        return "ungated" if self.up is None else "concatenated"

    @property
    def reads(self) -> tuple[str, ...]:
        """The matrices of all experts."""
        names = (name for name in (self.gate, self.up, self.down) if name is not None)
        return tuple(f"{self.experts}.*.{name}.weight" for name in names)

    def sizes(self, block: nn.Module) -> tuple[int, int]:
        """The hidden size, and the inner size of one expert."""
        experts: Any = block._modules[self.experts]
        inner, hidden = experts[0]._modules[self.gate].weight.shape
        return hidden, inner

    def matrices(self, block: nn.Module) -> dict[str, list[Tensor]]:
        """The weights of all experts, by projection: ``(inner, hidden)``, and ``(hidden, inner)`` for *down*."""
        experts: Any = [*block._modules[self.experts]._modules.values()]  # type: ignore[union-attr]
        names = [name for name in (self.gate, self.down, self.up) if name is not None]
        return {name: [expert._modules[name]._parameters["weight"] for expert in experts] for name in names}

    def have_changed(self, block: nn.Module) -> bool:
        """Whether an expert was pruned, quantised or cast, so that only the block knows how to call it."""
        projections = self.matrices(block).values()
        if not all({*map(type, listed)} <= {*PLAIN} for listed in projections):
            return True
        # One set of pairs, or of shapes, takes the host several times as long.
        return any(len({m.numel() for m in listed}) > 1 or len({m.dtype for m in listed}) > 1 for listed in projections)

    def compute(self, compute: Compute, block: nn.Module, routed: tuple[Tensor, Tensor, Tensor], idle: Idle) -> Tensor:
        """The experts' weighted sum for *routed*: rows ``(tokens, hidden)``, indices and weights ``(tokens, k)``.

        Result and errors are those of `reference.moe`.
        """
        experts: Any = block._modules[self.experts]
        matrices = self.matrices(block)
        if torch.is_autocast_enabled(routed[0].device.type):  # asked once: there may be hundreds of matrices
            matrices = {name: [narrowed(routed[0], matrix) for matrix in listed] for name, listed in matrices.items()}
        result: Tensor = compute(
            *routed,
            matrices[self.gate],
            matrices[self.down],
            up=None if self.up is None else matrices[self.up],
            layout=self.layout,
            activation=to_call(self.activation, experts[0], self.layout),
            idle=idle,
        )
        return result


@dataclass(frozen=True)
class SeamAdapter(Adapter):
    """The method of a block that gets rows, indices and weights.

    Attributes:
        variant: The gate.
        listed: Where the experts are.
        idle: Whether the gradient of an expert without tokens is zero or ``None``.
    """

    variant: str
    listed: ListedExperts
    idle: Idle

    @property
    def reads(self) -> tuple[str, ...]:
        """The matrices of all experts."""
        return self.listed.reads

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``moe(module, hidden_states, top_k_index, top_k_weights)``.

        Arguments, result and errors are those of `reference.moe`; the arguments are ``(tokens, hidden)``, floating;
        ``(tokens, k)``, integers; and ``(tokens, k)``, floating.
        """
        listed, idle = self.listed, self.idle

        def moe(module: nn.Module, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Any:
            if is_the_originals(hidden_states) or listed.have_changed(module):
                return NotImplemented
            return listed.compute(compute, module, (hidden_states, index, weights), idle)

        return moe


@dataclass(frozen=True)
class Routing:
    """How a block chooses experts: softmax, the largest k, and how it changes their weights.

    Attributes:
        router: The child that gives logits.
        top_k: Name of the k; dotted if an attribute of the block, such as its arguments, holds the k.
        renormalise: Whether the chosen weights are made to sum to one; or the attribute that says so.
        correction: The child that is called on the probabilities before choosing.
        floor: Name of the smallest sum to divide by.
        jitter: Name of the noise that training multiplies by; the original computes such calls.
    """

    router: str
    top_k: str
    renormalise: bool | str
    correction: str | None
    floor: str | None
    jitter: str | None

    @property
    def reads(self) -> tuple[str, ...]:
        """The numbers and the flag, and the router's weight, of which the dtype counts."""
        flag = self.renormalise if isinstance(self.renormalise, str) else None
        numbers = (name for name in (self.top_k, flag, self.floor, self.jitter) if name is not None)
        return (*numbers, f"{self.router}.weight")

    def route(self, block: nn.Module, hidden_states: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, indices and weights for the rows *x* of *hidden_states*.

        Args:
            block: The block.
            hidden_states: ``(batch, sequence, hidden)``, floating; a router without a weight is called with these.
            x: The same values as ``(tokens, hidden)``.

        Returns:
            ``(tokens, experts)`` in the router's dtype; ``(tokens, k)`` int64; ``(tokens, k)`` in the dtype of *x*.
        """
        router: Any = block._modules[self.router]
        weight = getattr(router, "weight", None)
        if weight is None:
            logits = router(hidden_states)
        else:
            logits = router(x if x.dtype is weight.dtype else x.to(weight.dtype))
        probabilities = functional.softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
        top_k = operator.attrgetter(self.top_k)(block)
        if self.correction is None:
            weights, index = torch.topk(probabilities, top_k, dim=-1)
        else:
            index = torch.topk(getattr(block, self.correction)(probabilities), top_k, dim=-1)[1]
            weights = probabilities.gather(-1, index)
        renormalise = getattr(block, self.renormalise) if isinstance(self.renormalise, str) else self.renormalise
        if renormalise:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total if self.floor is None else total.clamp(min=getattr(block, self.floor)))
        return logits, index, weights.to(x.dtype)


@dataclass(frozen=True)
class BlockAdapter(Adapter):
    """The forward of a block that routes.

    Attributes:
        variant: The gate, how the block routes, and what else it adds.
        listed: Where the experts are.
        routing: How the experts are chosen.
        shared: The expert that every token goes to.
        shared_gate: The child whose sigmoid weighs the shared expert.
        logits: Whether the logits are returned beside the result.
        idle: Whether the gradient of an expert without tokens is zero or ``None``.
    """

    variant: str
    listed: ListedExperts
    routing: Routing
    shared: str | None
    shared_gate: str | None
    logits: bool
    idle: Idle

    @property
    def reads(self) -> tuple[str, ...]:
        """The matrices of all experts, and what the routing reads."""
        return (*self.listed.reads, *self.routing.reads)

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states)``.

        ``hidden_states`` is ``(..., hidden)``, of any floating dtype that the block takes. The result has its shape and
        dtype; with *logits*, the logits come second, ``(tokens, experts)``. Errors are those of `reference.moe`.
        """

        def forward(module: nn.Module, hidden_states: Tensor) -> Any:
            if is_the_originals(hidden_states) or self.listed.have_changed(module) or self._jitters(module):
                return NotImplemented
            return self._compute(compute, module, hidden_states)

        return forward

    def _jitters(self, module: nn.Module) -> bool:
        jitter = self.routing.jitter
        return jitter is not None and module.training and getattr(module, jitter) > 0

    def _compute(self, compute: Compute, module: nn.Module, hidden_states: Tensor) -> Any:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, index, weights = self.routing.route(module, hidden_states, x)
        y = self.listed.compute(compute, module, (x, index, weights), self.idle)
        if self.shared is not None:
            shared = getattr(module, self.shared)(x)
            if self.shared_gate is not None:
                shared = torch.sigmoid(getattr(module, self.shared_gate)(x)) * shared
            y = y + shared
        y = y.view(hidden_states.shape)
        return (y, logits) if self.logits else y
