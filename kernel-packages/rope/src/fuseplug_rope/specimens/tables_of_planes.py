"""Attentions that rotate neighbours, and read an angle for each plane: the name of each says how."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import Attention
from .turns import leading, rotary, rotate_pairs, turned_halves, turned_pairs


def _first_half(table: Tensor, unsqueeze_dim: int) -> Tensor:
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)


def first_half_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = _first_half(cos, unsqueeze_dim), _first_half(sin, unsqueeze_dim)
    return rotary(rotate_pairs, q, cos, sin), rotary(rotate_pairs, k, cos, sin)


class FirstHalf(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return first_half_rotary(*self.states(hidden_states))


def first_half_partial_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = _first_half(cos, unsqueeze_dim), _first_half(sin, unsqueeze_dim)
    return leading(rotate_pairs, q, cos, sin), leading(rotate_pairs, k, cos, sin)


class FirstHalfPartial(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return first_half_partial_rotary(*self.states(hidden_states))


def first_half_wide_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = _first_half(cos, unsqueeze_dim), _first_half(sin, unsqueeze_dim)
    q_out = q.float() * cos + rotate_pairs(q).float() * sin
    k_out = k.float() * cos + rotate_pairs(k).float() * sin
    return q_out.to(q.dtype), k_out.to(q.dtype)


class FirstHalfWide(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return first_half_wide_rotary(*self.states(hidden_states))


def sin_first_rotary(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    sin, cos = (torch.repeat_interleave(table[:, :, None, :], 2, 3) for table in (sin, cos))
    return rotary(rotate_pairs, x, cos, sin)


class SinFirst(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, _, cos, sin = self.states(hidden_states)
        return sin_first_rotary(q.transpose(1, 2), sin, cos)


def trailing_rotary(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    cos, sin = (table.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim) for table in (cos, sin))
    left, turned = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    rotated = turned.float() * cos + rotate_pairs(turned).float() * sin
    return torch.cat((left, rotated.to(x.dtype)), dim=-1)


class Trailing(Attention):
    table = 0.25

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, _, cos, sin = self.states(hidden_states)
        return trailing_rotary(q, cos, sin)


def half_size_pairs_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned_pairs(q[..., ::2], q[..., 1::2], cos, sin), turned_pairs(k[..., ::2], k[..., 1::2], cos, sin)


class HalfSizePairs(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return half_size_pairs_rotary(*self.states(hidden_states))


def turned_wide_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    return turned_pairs(a, b, cos, sin).type_as(x)


def half_size_pairs_wide_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[None, :, None], sin[None, :, None]
    return turned_wide_pairs(q, cos, sin), turned_wide_pairs(k, cos, sin)


class HalfSizePairsWide(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return half_size_pairs_wide_rotary(q.transpose(1, 2), k.transpose(1, 2), cos[0], sin[0])


def pairs_table_rotary(x: Tensor, rope_cache: Tensor) -> Tensor:
    width = 2 * rope_cache.shape[-2]
    a, b = torch.unflatten(x[..., :width], -1, (-1, 2)).unbind(-1)
    table = rope_cache[: len(x), :, None]
    return torch.cat((turned_pairs(a, b, table[..., 0], table[..., 1]), x[..., width:]), dim=-1)


class PairsInOneTable(Attention):
    table = 0.25

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, _, cos, sin = self.states(hidden_states)
        return pairs_table_rotary(q.permute(2, 0, 1, 3), torch.stack((cos, sin), dim=-1).transpose(0, 1))


def matrix_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
    matrices = torch.stack((cos, -sin, sin, cos), dim=-1).view(*cos.shape, 2, 2).unsqueeze(unsqueeze_dim)
    q_rows, k_rows = (x.reshape(*x.shape[:-1], x.shape[-1] // 2, 1, 2) for x in (q, k))
    return (q_rows * matrices).sum(-1).flatten(-2), (k_rows * matrices).sum(-1).flatten(-2)


class Matrix(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return matrix_rotary(*self.states(hidden_states))


def turned_numbers(x: Tensor, freqs_cis: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], x.shape[-1] // 2, 2))
    return torch.view_as_real(numbers * freqs_cis[:, :, None, :]).flatten(3).type_as(x)


def complex_rotary(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    return turned_numbers(q, freqs_cis), turned_numbers(k, freqs_cis)


class Complex(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return complex_rotary(q.transpose(1, 2), k.transpose(1, 2), torch.complex(cos.float(), sin.float()))


def latent_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = (table[..., : table.shape[-1] // 2].unsqueeze(unsqueeze_dim) for table in (cos, sin))
    return turned_halves((q[..., ::2], q[..., 1::2]), cos, sin), turned_halves((k[..., ::2], k[..., 1::2]), cos, sin)


class Latent(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return latent_rotary(*self.states(hidden_states))
