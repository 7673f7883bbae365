"""Experts whose matrices lie one below the other, in a child."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FlatWeights(nn.Module):
    """The matrices of all experts, one expert below the other."""

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.hidden_size = hidden
        self.ffn_hidden_size = inner
        self.num_experts = num_experts
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.empty(num_experts * inner, hidden)) for _ in range(3))
        self.activation_fn = nn.SiLU()

    def forward(self, x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
        y: Tensor = (self.activation_fn(x @ w1.t()) * (x @ v1.t())) @ w2
        return y


class FlatExperts(nn.Module):
    """Experts that are slices of three matrices."""

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.mlp = FlatWeights(num_experts, hidden, inner)

    def forward(self, x: Tensor, weights: Tensor, top_weights: Tensor, top_experts: Tensor) -> Tensor:
        del weights
        rows = x.reshape(-1, x.shape[-1])
        y = torch.zeros_like(rows)
        matrices = (matrix.chunk(self.num_experts) for matrix in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
        for number, expert in enumerate(zip(*matrices, strict=True)):
            token, place = torch.where(top_experts == number)
            y = y.index_add(0, token, (self.mlp(rows[token], *expert) * top_weights[token, place, None]).to(y.dtype))
        return y.view(x.shape)
