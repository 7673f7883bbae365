"""Blocks that hold their experts in a list, one module each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(self.act_fn(self.w1(x)) * self.w3(x))
        return out


class SparseBlock(nn.Module):
    """Experts in a list, chosen by the block itself."""

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        inner: int,
        top_k: int,
        *,
        renormalise: bool = True,
        logits: bool = True,
        shared: int | None = None,
        shared_gate: bool = False,
        all_experts: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.norm_topk_prob = renormalise
        self.returns_logits = logits
        self.calls_idle_ones = all_experts
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(hidden, inner) for _ in range(num_experts)])
        self.shared_expert = None if shared is None else Expert(hidden, shared)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if shared_gate else None

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        weights, index = functional.softmax(logits, dim=-1, dtype=torch.float).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(index == number)
            if len(token) or self.calls_idle_ones:
                y = y.index_add(0, token, (expert(x[token]) * weights[token, place, None]).to(y.dtype))
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            y = y + (shared if self.shared_expert_gate is None else torch.sigmoid(self.shared_expert_gate(x)) * shared)
        y = y.view(hidden_states.shape)
        return (y, logits) if self.returns_logits else y


class FunctionalExpert(Expert):
    """An `Expert` with an activation that it does not hold."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__(hidden, inner)
        del self.act_fn

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


@dataclass
class Arguments:
    """The arguments that a block is made from, and keeps."""

    num_experts_per_tok: int


class ChosenFirst(nn.Module):
    """Like the first Mixtral's: chooses experts by their logits, and weighs them by the softmax of the chosen logits.

    With *of_all*, the softmax of all logits weighs them, and no flag says so.
    """

    def __init__(self, num_experts: int, hidden: int, inner: int, top_k: int, of_all: bool = False) -> None:
        super().__init__()
        self.of_all = of_all
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList([FunctionalExpert(hidden, inner) for _ in range(num_experts)])
        self.args = Arguments(top_k)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.view(-1, inputs.shape[-1])
        logits = self.gate(x)
        weights, selected = torch.topk(logits, self.args.num_experts_per_tok)
        if self.of_all:
            weights = functional.softmax(logits, dim=1, dtype=torch.float).gather(1, selected).type_as(x)
        else:
            weights = functional.softmax(weights, dim=1, dtype=torch.float).type_as(x)
        results = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(selected == number)
            results[token] += weights[token, place, None] * expert(x[token])
        return results.view_as(inputs)


class RoutedBlock(nn.Module):
    """Experts in a list, behind a method that is told which experts to use."""

    def __init__(self, num_experts: int, hidden: int, inner: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(num_experts))

    def moe(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states, dtype=top_k_weights.dtype)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(top_k_index == number)
            if len(token):
                y = y.index_add(0, token, expert(hidden_states[token]) * top_k_weights[token, place, None])
        return y.type(hidden_states.dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, index = self.gate(x).float().sigmoid().topk(self.top_k, dim=-1)
        return self.moe(x, index, weights).view(hidden_states.shape)
