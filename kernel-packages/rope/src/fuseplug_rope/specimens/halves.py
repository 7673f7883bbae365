"""Attentions that rotate the two halves of a head: the name of each says how."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import Attention
from .turns import leading, rotary, rotate_half, rotate_half_negated, turned_halves


def half_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotary(rotate_half, q, cos, sin), rotary(rotate_half, k, cos, sin)


class Half(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return half_rotary(*self.states(hidden_states))


def partial_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return leading(rotate_half, q, cos, sin), leading(rotate_half, k, cos, sin)


class Partial(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return partial_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)


def vision_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q_out, k_out = rotary(rotate_half, q.float(), cos, sin), rotary(rotate_half, k.float(), cos, sin)
    return q_out.to(q.dtype), k_out.to(k.dtype)


class Vision(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return vision_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def promoting_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotary(rotate_half, q, cos, sin).to(q.dtype), rotary(rotate_half, k, cos, sin).to(k.dtype)


class Promoting(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return promoting_rotary(q, k, cos.float(), sin.float())


def wide_twice_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_out = q.float() * cos + rotate_half(q.float()) * sin
    k_out = k.float() * cos + rotate_half(k.float()) * sin
    return q_out.to(q.dtype), k_out.to(q.dtype)


class WideTwice(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return wide_twice_rotary(*self.states(hidden_states))


def wide_tables_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    dtype, q, k = q.dtype, q.float(), k.float()
    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    return rotary(rotate_half, q, cos, sin).to(dtype), rotary(rotate_half, k, cos, sin).to(dtype)


class WideTables(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return wide_tables_rotary(*self.states(hidden_states))


def half_size_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_halves(q.chunk(2, dim=-1), cos, sin), turned_halves(k.chunk(2, dim=-1), cos, sin)


class HalfSize(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return half_size_rotary(*self.states(hidden_states))


def negated_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotary(rotate_half_negated, q, cos, sin), rotary(rotate_half_negated, k, cos, sin)


class Negated(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return negated_rotary(*self.states(hidden_states))


def half_size_negated_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, a * (-sin) + b * cos), dim=-1).type_as(x)


class HalfSizeNegated(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, _, cos, sin = self.states(hidden_states)
        return half_size_negated_rotary(q.transpose(1, 2), cos[:1, :, None], sin[:1, :, None])
