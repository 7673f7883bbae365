"""Blocks whose router is a module of its own, around stacked experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .listed_blocks import Expert
from .stacked_experts import TransposedExperts


class SortingRouter(nn.Module):
    """Sorts the slots by expert, and says how many slots each expert has."""

    def __init__(self, num_experts: int, hidden: int, top_k: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.layer = nn.Linear(hidden, num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int], Tensor]:
        logits = self.layer(x).float()
        best, index = logits.topk(self.top_k, dim=1)
        slots = index.flatten().argsort(stable=True)
        weights = best.softmax(dim=1).to(x.dtype).flatten()
        sizes: list[int] = index.flatten().bincount(minlength=self.num_experts).tolist()
        return slots, slots // self.top_k, weights[slots], sizes, logits


class ParallelLinear(nn.Module):
    """One projection of all experts, for sorted rows."""

    def __init__(self, num_experts: int, width_in: int, width_out: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, width_out, width_in))

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([functional.linear(*pair) for pair in zip(torch.split(x, sizes), self.weight, strict=True)])


class SortingBlock(nn.Module):
    """A module for each projection of all experts, over rows that the router has sorted."""

    def __init__(
        self, num_experts: int, hidden: int, inner: int, top_k: int, *, bias: bool = False, logits: bool = True
    ) -> None:
        super().__init__()
        self.returns_logits = logits
        self.activation = nn.SiLU()
        self.input_linear = ParallelLinear(num_experts, hidden, 2 * inner)
        self.output_linear = ParallelLinear(num_experts, inner, hidden)
        self.router = SortingRouter(num_experts, hidden, top_k)
        self.bias = nn.Parameter(torch.empty(hidden)) if bias else None

    def forward(self, layer_input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = layer_input.reshape(-1, layer_input.shape[-1])
        _, token, weights, sizes, logits = self.router(x)
        gate, up = self.input_linear(x[token], sizes).chunk(2, dim=-1)
        y = self.output_linear(self.activation(gate) * up, sizes) * weights[:, None]
        y = torch.zeros_like(x).index_add(0, token, y).view(layer_input.shape)
        y = y if self.bias is None else y + self.bias
        return (y, logits) if self.returns_logits else y


class ScoringRouter(nn.Linear):
    """Scores all experts, those not chosen with zero."""

    def __init__(self, num_experts: int, hidden: int, top_k: int) -> None:
        super().__init__(hidden, num_experts, bias=False)
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        best, index = logits.topk(self.top_k, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter(1, index, best)
        return scores.float().sigmoid().to(logits.dtype), logits


class EveryExpert(TransposedExperts):
    """Computes every expert, each for the same number of rows."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        x = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        y = torch.bmm(self._apply_gate(torch.bmm(x, self.gate_up_proj)), self.down_proj)
        return y.flatten(0, 1)


class InputScalingBlock(nn.Module):
    """Computes every expert for every token, on rows scaled by the scores, and adds a shared expert."""

    def __init__(self, num_experts: int, hidden: int, inner: int, top_k: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.experts = EveryExpert(num_experts, hidden, inner)
        self.router = ScoringRouter(num_experts, hidden, top_k)
        self.shared_expert = Expert(hidden, inner)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x)
        scaled = x.repeat(self.num_experts, 1) * scores.t().reshape(-1, 1)
        y = self.shared_expert(x)
        return y + self.experts(scaled).view(self.num_experts, *x.shape).sum(0), logits
