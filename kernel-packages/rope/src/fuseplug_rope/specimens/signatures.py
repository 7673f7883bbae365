"""Attentions whose rotary functions take other arguments than q, k and two tables with as many rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import Attention
from .turns import rotary, rotate_half


def single_rotary(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return rotary(rotate_half, x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


class Single(Attention):
    def forward(self, hidden_states: Tensor) -> Tensor:
        q, _, cos, sin = self.states(hidden_states)
        return single_rotary(q.transpose(1, 2), cos, sin, unsqueeze_dim=2)


def gathering_rotary(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = (table[position_ids].unsqueeze(unsqueeze_dim) for table in (cos, sin))
    return rotary(rotate_half, q, cos, sin), rotary(rotate_half, k, cos, sin), rotary(rotate_half, v, cos, sin)


class Gathering(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        positions = torch.arange(q.shape[-2], device=q.device).expand(len(q), -1)
        return gathering_rotary(q, k, -k, cos[0], sin[0], positions)


def merged(table: Tensor, mrope_section: list[int]) -> Tensor:
    parts = torch.split(table, mrope_section * 2, dim=-1)
    return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)


def sections_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = (merged(table, mrope_section).unsqueeze(unsqueeze_dim) for table in (cos, sin))
    return rotary(rotate_half, q, cos, sin), rotary(rotate_half, k, cos, sin)


class Sections(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        cos, sin = (torch.stack((table, table.square(), table.abs())) for table in (cos, sin))
        return sections_rotary(q, k, cos, sin, [4, 2, 2])


def rotated_patches(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rows = sin.shape[-2]
    before, patches = torch.split(x, [x.shape[-2] - rows, rows], dim=-2)
    return torch.cat((before, rotary(rotate_half, patches, cos, sin)), dim=-2)


def patches_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return rotated_patches(q, cos, sin), rotated_patches(k, cos, sin)


class Patches(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return patches_rotary(q, k, cos[0, 1:], sin[0, 1:])


def unpaired_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    length = q.size(-2)
    q_out = q * cos[..., -length:, :] + rotate_half(q) * sin[..., -length:, :]
    return q_out, rotary(rotate_half, k, cos, sin)


class Unpaired(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return unpaired_rotary(q[..., 1:, :], k, cos, sin)
