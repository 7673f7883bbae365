"""Small mixtures of experts as models write them, one for each way to write them that a kernel here claims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["specimens"]


def specimens() -> list[nn.Module]:
    """Modules that every kernel of this package fuses, odd sizes among them."""
    generator = torch.Generator().manual_seed(0)
    modules: list[nn.Module] = [
        StackedExperts(4, 12, 7),
        StackedExperts(1, 5, 3, nn.GELU("tanh")),
        StackedExperts(5, 16, 9, nn.GELU(), sums="at-once"),
        StackedExperts(4, 12, 7, nn.ReLU()),
        TransposedExperts(4, 12, 7),
        ClampedExperts(3, 12, 5),
        ActivationClampedExperts(3, 12, 5),
        InterleavedExperts(4, 10, 6),
        DenselyWeightedExperts(4, 10, 6),
        EveryExpertInEval(4, 10, 6),
        UngatedExperts(4, 11, 7),
        OwnGateExperts(4, 12, 6),
        NormedExperts(4, 12, 7),
        SparseBlock(5, 12, 7, top_k=2),
        SparseBlock(6, 9, 5, top_k=3, renormalise=False, logits=False),
        SparseBlock(4, 12, 7, top_k=2, shared=8, shared_gate=True),
        SparseBlock(4, 12, 7, top_k=2, shared=8, all_experts=True),
        ChosenFirst(5, 12, 7, top_k=2),
        ChosenFirst(6, 9, 5, top_k=2, of_all=True),
        RoutedBlock(5, 12, 7, top_k=2),
        SortingBlock(5, 12, 7, top_k=2),
        SortingBlock(6, 9, 5, top_k=3, bias=True, logits=False),
        InputScalingBlock(4, 12, 7, top_k=1),
        InputScalingBlock(5, 10, 6, top_k=2),
        FlatExperts(4, 12, 7),
        PassingExperts(4, 12, 7, passing=2),
        RoutedBlock(5, 12, 7, top_k=2, passing=3),
    ]
    for module in modules:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return modules


class StackedExperts(nn.Module):
    """Gate and up side by side in one tensor; experts one after the other, or their rows all sorted first."""

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
                found = (top_k_index.reshape(-1) == expert).nonzero()[:, 0]
                slots = torch.cat((slots, found))
                pieces.append(self.expert(hidden_states[found // top_k_index.shape[1]], expert))
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
    """The activation is clamped after it."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class InterleavedExperts(TransposedExperts):
    """Gate and up in turns, with biases, and no function that could be asked what the gate is."""

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
    """In eval mode every expert computes every token, and a weight of zero has a gradient too."""

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        if self.training:
            return super().forward(hidden_states, router_indices, routing_weights)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        each = [self.expert(rows, expert) * routing_weights[:, expert, None] for expert in range(self.num_experts)]
        return torch.stack(each).sum(0).to(rows.dtype).view(hidden_states.shape)


class SquaredReLU(nn.Module):
    """relu(x)²."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


class UngatedExperts(StackedExperts):
    """One projection, an activation, another projection."""

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__(num_experts, hidden, inner, SquaredReLU())
        del self.gate_up_proj
        del self.down_proj
        self.up_proj = nn.Parameter(torch.empty(num_experts, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner))

    def expert(self, x: Tensor, expert: int) -> Tensor:
        return self.project_back(self.act_fn(functional.linear(x, self.up_proj[expert])), expert)


class OwnGateExperts(StackedExperts):
    """A gate that no table has: it is called."""

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
    """The last ones give back their rows; the first projection has weights for them nevertheless."""

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
    """The same, with an activation that it does not hold."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__(hidden, inner)
        del self.act_fn

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


@dataclass
class Arguments:
    """What a block is made from, and keeps."""

    num_experts_per_tok: int


class ChosenFirst(nn.Module):
    """As the first Mixtral's: experts are chosen by their logits, and the chosen ones' softmax weighs them.

    With *of_all*, the softmax of all logits does, and no flag says so.
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
    """Experts in a list behind a method that is told which to take."""

    def __init__(self, num_experts: int, hidden: int, inner: int, top_k: int, passing: int = 0) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden, num_experts + passing, bias=False)
        experts = [Expert(hidden, inner) for _ in range(num_experts)]
        self.experts = nn.ModuleList([*experts, *(nn.Identity() for _ in range(passing))])

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


class SortingRouter(nn.Module):
    """Sorts the slots by expert, and says how many each has."""

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
    """One projection of all experts, for rows that are sorted."""

    def __init__(self, num_experts: int, width_in: int, width_out: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, width_out, width_in))

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([functional.linear(*each) for each in zip(torch.split(x, sizes), self.weight, strict=True)])


class SortingBlock(nn.Module):
    """Projections of all experts in a module each, over rows that the router has sorted."""

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
    """Scores all experts, zero where one is not chosen."""

    def __init__(self, num_experts: int, hidden: int, top_k: int) -> None:
        super().__init__(hidden, num_experts, bias=False)
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        best, index = logits.topk(self.top_k, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter(1, index, best)
        return scores.float().sigmoid().to(logits.dtype), logits


class EveryExpert(nn.Module):
    """Every expert, each for as many rows."""

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, hidden, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(num_experts, inner, hidden))

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(len(self.gate_up_proj), -1, hidden_states.shape[-1])
        gate, up = torch.bmm(x, self.gate_up_proj).chunk(2, dim=-1)
        y: Tensor = torch.bmm(up * self.act_fn(gate), self.down_proj)
        return y.flatten(0, 1)


class InputScalingBlock(nn.Module):
    """Every expert for every token, on rows that are scaled by the scores, and one expert for all."""

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


class FlatWeights(nn.Module):
    """The matrices of all experts, those of one below those of the other."""

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
        for number, each in enumerate(zip(*matrices, strict=True)):
            token, place = torch.where(top_experts == number)
            y = y.index_add(0, token, (self.mlp(rows[token], *each) * top_weights[token, place, None]).to(y.dtype))
        return y.view(x.shape)
