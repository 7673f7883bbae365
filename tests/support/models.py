"""Toy models with what the real ones have: norms of several semantics, functions looked up as globals, shared parts."""

import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    """Llama's norm, which scales after the cast."""

    def __init__(self, size=16, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.eps = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states.to(dtype)


def normal(self, x):
    """What `Norm` computes, for forwards that do more than that."""
    wide = x.to(torch.float32)
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class CastLastNorm(Norm):
    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return (self.weight * hidden_states).to(dtype)


class GemmaNorm(Norm):
    def forward(self, hidden_states):
        wide = hidden_states.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normal * (1.0 + self.weight.float())).type_as(hidden_states)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def apply_rotary(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_gate(x, gate):
    return x * torch.sigmoid(gate)


class Attention(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.q = nn.Linear(size, size, bias=False)
        self.k = nn.Linear(size, size, bias=False)

    def forward(self, hidden_states):
        length, size = hidden_states.shape[-2:]
        angle = torch.arange(length, dtype=torch.float32)[:, None] * torch.linspace(1, 0.1, size)
        cos, sin = (t.to(hidden_states) for t in (angle.cos(), angle.sin()))
        q, k = apply_rotary(self.q(hidden_states), self.k(hidden_states), cos, sin)
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ hidden_states
        return apply_gate(mixed, hidden_states)


class MLP(nn.Module):
    def __init__(self, size=16, act=None):
        super().__init__()
        self.gate = nn.Linear(size, 2 * size, bias=False)
        self.up = nn.Linear(size, 2 * size, bias=False)
        self.down = nn.Linear(2 * size, size, bias=False)
        self.act = act or nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A parent that calls its children one by one, as sparse blocks do."""

    def __init__(self, size=16):
        super().__init__()
        self.experts = nn.ModuleList([Norm(size, eps) for eps in (1e-6, 1e-5)])

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


class Block(nn.Module):
    def __init__(self, size=16, norm=Norm):
        super().__init__()
        self.norm1 = norm(size)
        self.attention = Attention(size)
        self.norm2 = norm(size)
        self.mlp = MLP(size)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Toy(nn.Module):
    def __init__(self, layers=2, size=16, norm=Norm):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(size, norm) for _ in range(layers)])
        self.norm = norm(size)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Pipeline:
    """Not a module, but holds one, like transformers' pipelines."""

    def __init__(self):
        self.model = nn.Linear(2, 2)


def replicated(model, factor):
    """What `torch.nn.parallel.replicate` makes for a second device, with parameters *factor* times as large."""
    modules = list(model.modules())
    copies = {id(module): module._replicate_for_data_parallel() for module in modules}
    for module in modules:
        replica = copies[id(module)]
        for name, child in module._modules.items():
            setattr(replica, name, copies[id(child)])
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter * factor)
    return copies[id(model)]


def gelu_mlp():
    return MLP(act=nn.GELU())


def silu(x):
    return F.silu(x)


def inputs(rows=5, size=16, dtype=torch.float32, seed=7):
    return torch.randn(2, rows, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tiny_llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**config | changes))


def tiny_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
        )
    )


def tokens(length=6):
    return torch.arange(2 * length).reshape(2, length) % 32
