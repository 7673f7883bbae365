"""As nanoGPT's speedruns began: a rotary module that hands out cached tables, applied by a function to one tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Rotary(nn.Module):
    def __init__(self, dim: int, base: float = 10000) -> None:
        super().__init__()
        self.inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.seq_len_cached: int | None = None
        self.cos_cached: Tensor | None = None
        self.sin_cached: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seq_len = x.shape[1]
        if seq_len != self.seq_len_cached:
            self.seq_len_cached = seq_len
            freqs = torch.outer(torch.arange(seq_len).type_as(self.inv_freq), self.inv_freq)
            self.cos_cached, self.sin_cached = freqs.cos().bfloat16(), freqs.sin().bfloat16()
        return self.cos_cached[None, :, None, :], self.sin_cached[None, :, None, :]


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    assert x.ndim == 4
    d = x.shape[3] // 2
    x1, x2 = x[..., :d], x[..., d:]
    y1 = x1 * cos + x2 * sin
    y2 = x1 * (-sin) + x2 * cos
    return torch.cat([y1, y2], 3).type_as(x)


class RMSNorm(nn.Module):
    """The epsilon is written in the code."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)) * self.g


class CausalSelfAttention(nn.Module):
    def __init__(self, dim: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.rotary = Rotary(dim // n_head)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (c(x).view(B, T, self.n_head, -1) for c in (self.c_q, self.c_k, self.c_v))
        cos, sin = self.rotary(q)
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class SwiGLU(nn.Module):
    """Hidden and inner widths are one, and silu is written out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, dim, bias=False)
        self.down = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, n_head: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(dim), RMSNorm(dim)
        self.attn = CausalSelfAttention(dim, n_head)
        self.mlp = SwiGLU(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, dim: int = 64, n_head: int = 4, n_layer: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(64, dim)
        self.h = nn.ModuleList([Block(dim, n_head) for _ in range(n_layer)])
        self.lm_head = nn.Linear(dim, 64, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.lm_head(x)
