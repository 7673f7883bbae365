"""Like torchtune: parts that are passed in, norms with a ``scale``, and a rotary module with one cache of pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.normalized_shape = (dim,)
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        x_normed = (x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)
        return x_normed * self.scale


class RotaryPositionalEmbeddings(nn.Module):
    def __init__(self, dim: int, max_seq_len: int = 32, base: int = 10_000) -> None:
        super().__init__()
        self.dim, self.max_seq_len, self.base = dim, max_seq_len, base
        theta = 1.0 / (base ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
        self.register_buffer("theta", theta, persistent=False)
        idx_theta = torch.einsum("i, j -> ij", torch.arange(max_seq_len, dtype=theta.dtype), theta).float()
        cache = torch.stack([torch.cos(idx_theta), torch.sin(idx_theta)], dim=-1)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        seq_len = x.size(1)
        rope_cache = self.cache[:seq_len] if input_pos is None else self.cache[input_pos]
        xshaped = x.float().reshape(*x.shape[:-1], -1, 2)
        rope_cache = rope_cache.view(-1, xshaped.size(1), 1, xshaped.size(3), 2)
        x_out = torch.stack(
            [
                xshaped[..., 0] * rope_cache[..., 0] - xshaped[..., 1] * rope_cache[..., 1],
                xshaped[..., 1] * rope_cache[..., 0] + xshaped[..., 0] * rope_cache[..., 1],
            ],
            -1,
        )
        return x_out.flatten(3).type_as(x)


class FeedForward(nn.Module):
    def __init__(
        self,
        *,
        gate_proj: nn.Module,
        down_proj: nn.Module,
        up_proj: nn.Module | None = None,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.w1 = gate_proj
        self.w2 = down_proj
        self.w3 = up_proj
        self.activation = activation or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.w1(x))
        if self.w3 is not None:
            h = h * self.w3(x)
        return self.w2(h)


class MultiHeadAttention(nn.Module):
    def __init__(
        self, *, num_heads: int, q_proj: nn.Module, k_proj: nn.Module, v_proj: nn.Module, output_proj: nn.Module,
        pos_embeddings: nn.Module, q_norm: nn.Module, k_norm: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = q_proj, k_proj, v_proj, output_proj
        self.pos_embeddings = pos_embeddings
        self.q_norm, self.k_norm = q_norm, k_norm

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (proj(x).view(b, s, self.num_heads, -1) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = self.pos_embeddings(q, input_pos=input_pos)
        k = self.pos_embeddings(k, input_pos=input_pos)
        q, k = self.q_norm(q.transpose(1, 2)), self.k_norm(k.transpose(1, 2))
        output = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.output_proj(output.transpose(1, 2).contiguous().view(b, s, -1))


class TransformerSelfAttentionLayer(nn.Module):
    def __init__(self, attn: nn.Module, mlp: nn.Module, *, sa_norm: nn.Module, mlp_norm: nn.Module) -> None:
        super().__init__()
        self.attn, self.mlp, self.sa_norm, self.mlp_norm = attn, mlp, sa_norm, mlp_norm

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        h = self.attn(self.sa_norm(x), input_pos=input_pos) + x
        return h + self.mlp(self.mlp_norm(h))


class TransformerDecoder(nn.Module):
    def __init__(self, tok_embeddings: nn.Module, layers: list[nn.Module], norm: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.tok_embeddings, self.layers, self.norm, self.output = tok_embeddings, nn.ModuleList(layers), norm, output

    def forward(self, tokens: Tensor, input_pos: Tensor | None = None) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, input_pos=input_pos)
        return self.output(self.norm(h)).float()


def decoder(dim: int = 64, num_heads: int = 4, num_layers: int = 2) -> TransformerDecoder:
    rope = RotaryPositionalEmbeddings(dim // num_heads)

    def linear(width_in: int, width_out: int) -> nn.Module:
        return nn.Linear(width_in, width_out, bias=False)

    layers: list[nn.Module] = [
        TransformerSelfAttentionLayer(
            MultiHeadAttention(
                num_heads=num_heads,
                q_proj=linear(dim, dim),
                k_proj=linear(dim, dim),
                v_proj=linear(dim, dim),
                output_proj=linear(dim, dim),
                pos_embeddings=rope,
                q_norm=RMSNorm(dim // num_heads),
                k_norm=RMSNorm(dim // num_heads),
            ),
            FeedForward(gate_proj=linear(dim, 96), down_proj=linear(96, dim), up_proj=linear(dim, 96)),
            sa_norm=RMSNorm(dim),
            mlp_norm=RMSNorm(dim),
        )
        for _ in range(num_layers)
    ]
    return TransformerDecoder(nn.Embedding(64, dim), layers, RMSNorm(dim), linear(dim, 64))
