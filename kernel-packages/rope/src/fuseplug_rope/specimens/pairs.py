"""Attentions that rotate neighbours, with tables of an angle for each element: the name of each says how."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import Attention
from .turns import leading, rotary, rotate_half, rotate_pairs


def pairs_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotary(rotate_pairs, q, cos, sin), rotary(rotate_pairs, k, cos, sin)


class Interleaved(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return pairs_rotary(*self.states(hidden_states))


def pairs_partial_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return leading(rotate_pairs, q, cos, sin), leading(rotate_pairs, k, cos, sin)


class InterleavedPartial(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return pairs_partial_rotary(*self.states(hidden_states))


def pairs_wide_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    dtype, q, k = q.dtype, q.float(), k.float()
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotary(rotate_pairs, q, cos, sin).to(dtype), rotary(rotate_pairs, k, cos, sin).to(dtype)


class InterleavedWide(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return pairs_wide_rotary(*self.states(hidden_states))


def pairs_wide_own_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q_out, k_out = rotary(rotate_pairs, q.float(), cos, sin), rotary(rotate_pairs, k.float(), cos, sin)
    return q_out.type_as(q), k_out.type_as(k)


class InterleavedWideOwn(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return pairs_wide_own_rotary(q, k, cos[0], sin[0])


def pairs_vision_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q_out, k_out = rotary(rotate_pairs, q.float(), cos, sin), rotary(rotate_pairs, k.float(), cos, sin)
    return q_out.to(q.dtype), k_out.to(k.dtype)


class InterleavedVision(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return pairs_vision_rotary(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])


def pairs_wide_twice_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_out = q.float() * cos + rotate_pairs(q).float() * sin
    k_out = k.float() * cos + rotate_pairs(k).float() * sin
    return q_out.to(q.dtype), k_out.to(q.dtype)


class InterleavedWideTwice(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return pairs_wide_twice_rotary(*self.states(hidden_states))


def latent_full_table_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q, k = (torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) for x in (q, k))
    return rotary(rotate_half, q, cos, sin), rotary(rotate_half, k, cos, sin)


class LatentFullTable(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return latent_full_table_rotary(*self.states(hidden_states))
