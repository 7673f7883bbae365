"""Attentions that look up no function: they rotate in a method of their own, or call a module that holds tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import Attention
from .turns import rotary, rotate_half, turned_pairs


class OwnMethod(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_size = 3, self.head_dim

    def forward(self, hidden_states: Tensor) -> Tensor:
        _, _, cos, sin = self.states(hidden_states)
        tables = torch.stack((cos[0], sin[0]))[:, :, None, None, :]
        return self._apply_rotary_embedding(self.q_proj(hidden_states), tables)

    def _apply_rotary_embedding(self, hidden_states: Tensor, tables: Tensor) -> Tensor:
        batch, length, width = hidden_states.shape
        x = hidden_states.view(batch, length, self.num_heads, self.head_size).transpose(0, 1)
        cos, sin = tables[0, :length, ...], tables[1, :length, ...]
        a, b = x[..., : self.head_size // 2], x[..., self.head_size // 2 :]
        x = x * cos + torch.cat((-b, a), dim=-1) * sin
        return x.transpose(0, 1).reshape(batch, length, width)


class PartialMethod(Attention):
    """An attribute says how much is rotated."""

    table = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.rotary_ndims = self.angles

    def rotate_half(self, x: Tensor) -> Tensor:
        return rotate_half(x)

    def apply_rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        (q_turned, q_rest), (k_turned, k_rest) = (x.tensor_split((self.rotary_ndims,), dim=-1) for x in (q, k))
        q_turned = q_turned * cos + self.rotate_half(q_turned) * sin
        k_turned = k_turned * cos + self.rotate_half(k_turned) * sin
        return torch.cat((q_turned, q_rest), dim=-1), torch.cat((k_turned, k_rest), dim=-1)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return self.apply_rotary(q, k, cos[0], sin[0])


def _turns(angles: int) -> Tensor:
    return torch.arange(32.0)[:, None] * torch.logspace(0, -2, angles)


class Halves(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", _turns(8).cos(), persistent=False)
        self.register_buffer("sin", _turns(8).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (table[None, : x.shape[-3], None, :] for table in (self.cos, self.sin))
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos + b * sin, a * (-sin) + b * cos), dim=-1).type_as(x)


class Pairs(nn.Module):
    """Takes positions, too."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        cache = torch.stack((_turns(8).cos(), _turns(8).sin()), dim=-1)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        cache = self.cache[: x.shape[1]] if input_pos is None else self.cache[input_pos]
        cache = cache.view(-1, x.shape[1], 1, x.shape[3] // 2, 2)
        a, b = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
        return turned_pairs(a, b, cache[..., 0], cache[..., 1]).type_as(x)


class ComplexNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.freqs_cis = torch.polar(torch.ones(32, 8), _turns(8))

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(torch.unflatten(x.float(), -1, (-1, 2)))
        return torch.view_as_real(numbers * self.freqs_cis[: x.shape[1], None]).flatten(-2).type_as(x)


class HeadsFirst(nn.Module):
    """Has an angle for each element, and casts nothing."""

    cos_cached: Tensor
    sin_cached: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_cached", _turns(8).repeat(1, 2).cos(), persistent=False)
        self.register_buffer("sin_cached", _turns(8).repeat(1, 2).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return rotary(rotate_half, x, self.cos_cached[: x.shape[-2]], self.sin_cached[: x.shape[-2]])


class ModuleOfHalves(Attention):
    """Rotates by a module that holds its own tables."""

    module: type[nn.Module] = Halves

    def __init__(self) -> None:
        super().__init__()
        self.rotary = self.module()

    def forward(self, hidden_states: Tensor) -> Any:
        return self.rotary(self.states(hidden_states)[0].transpose(1, 2))


class ModuleOfPairs(ModuleOfHalves):
    module = Pairs


class ModuleOfComplexNumbers(ModuleOfHalves):
    module = ComplexNumbers


class ModuleOfHeadsFirst(ModuleOfHalves):
    module = HeadsFirst

    def forward(self, hidden_states: Tensor) -> Any:
        return self.rotary(self.states(hidden_states)[0])
