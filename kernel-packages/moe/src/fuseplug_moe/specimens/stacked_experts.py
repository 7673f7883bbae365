"""Experts whose weights are stacked in two tensors; the caller tells them which rows to take."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


class StackedExperts(nn.Module):
    """Gate and up side by side in one tensor; adds the experts one by one, or the rows of all experts at once."""

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        inner: int,
        activation: nn.Module | None = None,
        sums: Literal["one-by-one", "at-once"] = "one-by-one",
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.sums = sums
        self.act_fn = activation or nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner))

    def project(self, x: Tensor, expert: int) -> Tensor:
        return functional.linear(x, self.gate_up_proj[expert])

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated: Tensor = self.act_fn(gate)
        return activated * up

    def project_back(self, x: Tensor, expert: int) -> Tensor:
        return functional.linear(x, self.down_proj[expert])

    def expert(self, x: Tensor, expert: int) -> Tensor:
        return self.project_back(self._apply_gate(self.project(x, expert)), expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.sums == "at-once":
            slots = top_k_index.new_zeros(0)
            pieces = []
            for expert in range(self.num_experts):
                chosen = (top_k_index.reshape(-1) == expert).nonzero()[:, 0]
                slots = torch.cat((slots, chosen))
                pieces.append(self.expert(hidden_states[chosen // top_k_index.shape[1]], expert))
            weighted = torch.cat(pieces) * top_k_weights.reshape(-1)[slots, None]
            rows = weighted[torch.argsort(slots)].view(*top_k_index.shape, -1)
            return rows.sum(1).to(hidden_states.dtype)
        y = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            out = self.expert(hidden_states[token], expert) * top_k_weights[token, place, None]
            y = y.index_add(0, token, out.to(y.dtype))
        return y


class TransposedExperts(StackedExperts):
    """Matrices that are (in, out)."""

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__(num_experts, hidden, inner)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, hidden, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(num_experts, inner, hidden))

    def project(self, x: Tensor, expert: int) -> Tensor:
        return x @ self.gate_up_proj[expert]

    def project_back(self, x: Tensor, expert: int) -> Tensor:
        return x @ self.down_proj[expert]


class ClampedExperts(StackedExperts):
    """The gate is clamped before its activation."""

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__(num_experts, hidden, inner)
        self.limit = 2.0

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class ActivationClampedExperts(ClampedExperts):
    """The gate is clamped after its activation."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class InterleavedExperts(TransposedExperts):
    """Gate and up in turns, with biases, and without a function that would show what the gate is."""

    _apply_gate = None  # type: ignore[assignment]

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__(num_experts, hidden, inner)
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * inner))
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden))
        del self.act_fn
        self.alpha = 1.702
        self.limit = 7.0

    def expert(self, x: Tensor, expert: int) -> Tensor:
        gate_up = x @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha) @ self.down_proj[expert] + self.down_proj_bias[expert]


class DenselyWeightedExperts(InterleavedExperts):
    """The router gives a weight for each expert, chosen or not."""

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        y = torch.zeros_like(rows)
        for expert in range(self.num_experts):
            token = torch.where(router_indices == expert)[0]
            out = self.expert(rows[token], expert) * routing_weights[token, expert, None]
            y = y.index_add(0, token, out.to(y.dtype))
        return y.view(hidden_states.shape)


class EveryExpertInEval(DenselyWeightedExperts):
    """In eval mode, every expert computes every token, so a weight of zero has a gradient, too."""

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        if self.training:
            return super().forward(hidden_states, router_indices, routing_weights)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        results = [self.expert(rows, expert) * routing_weights[:, expert, None] for expert in range(self.num_experts)]
        return torch.stack(results).sum(0).to(rows.dtype).view(hidden_states.shape)


class SquaredReLU(nn.Module):
    """relu(x)²."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


class UngatedExperts(StackedExperts):
    """One projection, an activation, another projection."""

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__(num_experts, hidden, inner, SquaredReLU())
        del self.gate_up_proj
        self.up_proj = nn.Parameter(torch.empty(num_experts, inner, hidden))

    def expert(self, x: Tensor, expert: int) -> Tensor:
        return self.project_back(self.act_fn(functional.linear(x, self.up_proj[expert])), expert)


class OwnGateExperts(StackedExperts):
    """A gate that is in no table, and so is called."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return 3.0 * torch.tanh(functional.silu(gate) / 3.0) * up


class NormedExperts(StackedExperts):
    """Each expert's rows are normed before they are weighted."""

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__(num_experts, hidden, inner)
        self.post_expert_norm = nn.RMSNorm(hidden, eps=1e-6)

    def expert(self, x: Tensor, expert: int) -> Tensor:
        out: Tensor = self.post_expert_norm(super().expert(x, expert))
        return out


class PassingExperts(StackedExperts):
    """The last experts return their rows; the first projection has weights for them nevertheless."""

    def __init__(self, num_experts: int, hidden: int, inner: int, passing: int) -> None:
        super().__init__(num_experts, hidden, inner)
        self.total_experts = num_experts + passing
        self.identity_expert = nn.Identity()
        self.gate_up_proj = nn.Parameter(torch.empty(self.total_experts, 2 * inner, hidden))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = super().forward(hidden_states, top_k_index, top_k_weights)
        for number in range(self.num_experts, self.total_experts):
            token, place = torch.where(top_k_index == number)
            y = y.index_add(0, token, (hidden_states[token] * top_k_weights[token, place, None]).to(y.dtype))
        return y
