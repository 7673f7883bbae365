"""As remote code of GPT-NeoX's, Falcon's and ChatGLM's times: the attention rotates by a method, the MLP splits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RotaryAttention(nn.Module):
    """Rotates the leading half of each head, by a method of its own."""

    def __init__(self, hidden_size: int, num_heads: int, rotary_pct: float = 0.5) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.rotary_ndims = int(self.head_dim * rotary_pct)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def rotate_half(self, x: Tensor) -> Tensor:
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)

    def apply_rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q_rot, q_pass = q[..., : self.rotary_ndims], q[..., self.rotary_ndims :]
        k_rot, k_pass = k[..., : self.rotary_ndims], k[..., self.rotary_ndims :]
        q_rot = q_rot * cos + self.rotate_half(q_rot) * sin
        k_rot = k_rot * cos + self.rotate_half(k_rot) * sin
        return torch.cat((q_rot, q_pass), dim=-1), torch.cat((k_rot, k_pass), dim=-1)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], self.num_heads, 3 * self.head_dim)
        q, k, v = self.query_key_value(hidden_states).view(shape).transpose(1, 2).chunk(3, dim=-1)
        q, k = self.apply_rotary(q, k, cos, sin)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(output.transpose(1, 2).flatten(2))


def apply_rotary_pos_emb(x: Tensor, rope_cache: Tensor) -> Tensor:
    sq, np = x.size(0), x.size(2)
    rot_dim = rope_cache.shape[-2] * 2
    x, x_pass = x[..., :rot_dim], x[..., rot_dim:]
    rope_cache = rope_cache[:sq]
    xshaped = x.reshape(sq, -1, np, rot_dim // 2, 2)
    rope_cache = rope_cache.view(sq, -1, 1, xshaped.size(3), 2)
    x_out2 = torch.stack(
        [
            xshaped[..., 0] * rope_cache[..., 0] - xshaped[..., 1] * rope_cache[..., 1],
            xshaped[..., 1] * rope_cache[..., 0] + xshaped[..., 0] * rope_cache[..., 1],
        ],
        -1,
    )
    return torch.cat((x_out2.flatten(3), x_pass), dim=-1)


class CacheAttention(nn.Module):
    """The sequence comes first, and cos and sin lie side by side in one cache."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, rope_cache: Tensor) -> Tensor:
        sq, b, _ = hidden_states.shape
        q, k, v = self.query_key_value(hidden_states).view(sq, b, self.num_heads, -1).chunk(3, dim=-1)
        q, k = apply_rotary_pos_emb(q, rope_cache), apply_rotary_pos_emb(k, rope_cache)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(output.permute(2, 0, 1, 3).reshape(sq, b, -1))


class ChunkedMLP(nn.Module):
    """The activation is a function made where it is kept."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=False)

        def swiglu(x: Tensor) -> Tensor:
            x = torch.chunk(x, 2, dim=-1)
            return F.silu(x[0]) * x[1]

        self.activation_func = swiglu
        self.dense_4h_to_h = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation_func(self.dense_h_to_4h(hidden_states)))


class SplitMLP(nn.Module):
    def __init__(self, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.inner = inner
        self.gate_up = nn.Linear(hidden_size, 2 * inner)
        self.down = nn.Linear(inner, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).split(self.inner, dim=-1)
        return self.down(F.gelu(gate) * up)


class SlicedMLP(SplitMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        return self.down(gate_up[..., : self.inner] * F.silu(gate_up[..., self.inner :]))


class UnflattenedMLP(SplitMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).unflatten(-1, (2, -1)).unbind(-2)
        return self.down(gate * gate.sigmoid() * up)


class HalvedMLP(SplitMLP):
    """The widths come from the tensor, and the activation is a method."""

    def swish(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        half = gate_up.size(-1) // 2
        return self.down(self.swish(gate_up[..., :half]) * gate_up[..., half:])


class Layer(nn.Module):
    def __init__(self, hidden_size: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), *tables)
        return x + self.mlp(self.post_attention_layernorm(x))


def turns(length: int, dim: int) -> Tensor:
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
    return torch.outer(torch.arange(length).float(), inv_freq)


class NeoX(nn.Module):
    def __init__(self, hidden_size: int = 64, num_heads: int = 4) -> None:
        super().__init__()
        self.rotary_dim = hidden_size // num_heads // 2
        self.embed_in = nn.Embedding(64, hidden_size)
        mlps = [kind(hidden_size, 96) for kind in (SplitMLP, SlicedMLP, UnflattenedMLP, HalvedMLP)]
        self.layers = nn.ModuleList([Layer(hidden_size, RotaryAttention(hidden_size, num_heads), mlp) for mlp in mlps])
        self.embed_out = nn.Linear(hidden_size, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_in(tokens)
        table = turns(tokens.shape[1], self.rotary_dim).repeat(1, 2)
        for layer in self.layers:
            x = layer(x, table.cos().to(x.dtype), table.sin().to(x.dtype))
        return self.embed_out(x)


class ChatGLM(nn.Module):
    def __init__(self, hidden_size: int = 64, num_heads: int = 4, num_layers: int = 2) -> None:
        super().__init__()
        self.rotary_dim = hidden_size // num_heads // 2
        self.embedding = nn.Embedding(64, hidden_size)
        self.layers = nn.ModuleList(
            [
                Layer(hidden_size, CacheAttention(hidden_size, num_heads), ChunkedMLP(hidden_size, 96))
                for _ in range(num_layers)
            ]
        )
        self.output_layer = nn.Linear(hidden_size, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(0, 1)
        table = turns(tokens.shape[1], self.rotary_dim)
        cache = torch.stack((table.cos(), table.sin()), dim=-1)[:, None].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cache)
        return self.output_layer(x.transpose(0, 1))
