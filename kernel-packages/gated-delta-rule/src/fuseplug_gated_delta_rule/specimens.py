"""Small modules that the kernels here fuse, written as in models: one for each variant, to test kernels on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["specimens"]


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet's function, with the shapes of `fuseplug_gated_delta_rule.reference.gated_delta_rule`."""
    if query.shape[2] != value.shape[2]:
        query = query.repeat_interleave(value.shape[2] // query.shape[2], dim=2)
        key = key.repeat_interleave(value.shape[2] // key.shape[2], dim=2)
    flags = output_final_state, use_qk_l2norm_in_kernel
    return chunk_delta_attention(query, key, value, g.unsqueeze(-1), beta, chunk_size, initial_state, *flags, **kwargs)


def chunk_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention's function, with the same shapes."""
    if kwargs.get("cu_seqlens") is not None:
        raise ValueError("packed sequences cannot be kept apart")
    flag = use_qk_l2norm_in_kernel
    result, state = in_chunks(query, key, value, g, beta, chunk_size, initial_state, flag)
    return result, state if output_final_state else None


def in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int,
    initial_state: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    """Both functions, with all pairs of tokens in a chunk multiplied out; *g* has one channel, or as many as *key*."""
    dtype, tokens = query.dtype, query.shape[1]
    query, key, value, g, beta = [x.transpose(1, 2).float() for x in (query, key, value, g, beta.unsqueeze(-1))]
    if normalise:
        query = query * torch.rsqrt((query * query).sum(-1, keepdim=True) + 1e-6)
        key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)
    query = query * key.shape[-1] ** -0.5
    padding = (0, 0, 0, (chunk_size - tokens % chunk_size) % chunk_size)
    query, key, value, g, beta = [
        functional.pad(x, padding).reshape(x.shape[0], x.shape[1], -1, chunk_size, x.shape[-1])
        for x in (query, key, value, g, beta)
    ]
    g = g.cumsum(-2)
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=g.device).triu(1).unsqueeze(-1)
    decay = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(later, float("-inf")).exp()
    attention = (query.unsqueeze(-2) * key.unsqueeze(-3) * decay).sum(-1)
    system = (key.unsqueeze(-2) * key.unsqueeze(-3) * decay).sum(-1) * beta
    written = torch.linalg.solve_triangular(system, value * beta, upper=False, unitriangular=True)
    read = torch.linalg.solve_triangular(system, key * beta * g.exp(), upper=False, unitriangular=True)
    state = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
    state = state if initial_state is None else initial_state.to(value)
    results = torch.zeros_like(value)
    for chunk in range(key.shape[2]):
        new = written[:, :, chunk] - read[:, :, chunk] @ state
        since = g[:, :, chunk]
        results[:, :, chunk] = (query[:, :, chunk] * since.exp()) @ state + attention[:, :, chunk] @ new
        until = (since[:, :, -1:] - since).exp()
        state = state * since[:, :, -1].exp().unsqueeze(-1) + (key[:, :, chunk] * until).mT @ new
    results = results.flatten(2, 3)[:, :, :tokens].transpose(1, 2).contiguous().to(dtype)
    return results, state


class Mixer(nn.Module):
    """Projects, and mixes tokens by a gated delta rule.

    Args:
        key_heads: The number of heads of queries and keys.
        heads: The number of heads of values.
        per_channel: Whether each key channel of a head has a decay of its own.
    """

    def __init__(self, key_heads: int = 2, heads: int = 2, *, per_channel: bool = False) -> None:
        super().__init__()
        self.key_heads, self.heads, self.channels, self.per_channel = key_heads, heads, 4, per_channel
        self.decays = heads * self.channels if per_channel else heads
        self.in_proj = nn.Linear(8, (2 * key_heads + heads) * self.channels)
        self.g_proj = nn.Linear(8, self.decays)
        self.b_proj = nn.Linear(8, heads)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The queries, keys, values, decays and betas to mix."""
        qk, v = self.in_proj(hidden_states).split(
            [2 * self.key_heads * self.channels, self.heads * self.channels], dim=-1
        )
        q, k = qk.unflatten(-1, (2, self.key_heads, self.channels)).unbind(2)
        g = -functional.softplus(self.g_proj(hidden_states).float())
        g = g.view(*g.shape[:2], self.heads, self.channels) if self.per_channel else g
        return q, k, v.unflatten(-1, (self.heads, self.channels)), g, self.b_proj(hidden_states).sigmoid()


class GatedDeltaNet(Mixer):
    """Each head has a decay."""

    def forward(self, hidden_states: Tensor, state: Tensor | None = None, **kwargs: Any) -> Tensor:
        q, k, v, g, beta = self.project(hidden_states)
        result, _ = chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=state, use_qk_l2norm_in_kernel=True, **kwargs
        )
        return result.flatten(2)


class DeltaAttention(Mixer):
    """Each key channel has a decay."""

    def __init__(self) -> None:
        super().__init__(per_channel=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v, g, beta = self.project(hidden_states)
        result, _ = chunk_delta_attention(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return result.flatten(2)


def specimens() -> list[nn.Module]:
    """One module for each variant, and one whose key heads serve several heads."""
    return [GatedDeltaNet(), GatedDeltaNet(1, 2), DeltaAttention()]
