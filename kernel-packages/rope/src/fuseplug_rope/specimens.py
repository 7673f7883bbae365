"""Small modules as models write them, which the kernels here fuse: one for each form, to test kernels on."""

# The name of each says which form it is.
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["specimens"]


def specimens() -> list[nn.Module]:
    """One module for each way of calling and each variant."""
    return [
        Half(),
        Half(head_dim=6),
        Partial(),
        Vision(),
        Promoting(),
        WideTwice(),
        WideTables(),
        HalfSize(),
        Negated(),
        Interleaved(),
        InterleavedPartial(),
        InterleavedWide(),
        InterleavedWideOwn(),
        InterleavedVision(),
        InterleavedWideTwice(),
        FirstHalf(),
        FirstHalfPartial(),
        FirstHalfWide(),
        SinFirst(),
        Trailing(),
        HalfSizePairs(),
        Matrix(),
        Complex(),
        Latent(),
        LatentFullTable(),
        Single(),
        Gathering(),
        Sections(),
        Patches(),
        Unpaired(),
        OwnMethod(),
        PartialMethod(),
        HalfSizeNegated(),
        HalfSizePairsWide(),
        PairsInOneTable(),
        ModuleOfHalves(),
        ModuleOfPairs(),
        ModuleOfComplexNumbers(),
        ModuleOfHeadsFirst(),
    ]


class Attention(nn.Module):
    """Asks for a rotation, of q with three heads and k with two, as the forward of an attention does.

    Args:
        head_dim: The size of a head.
    """

    table = 1.0
    """Angles, as a part of head_dim."""

    def __init__(self, head_dim: int = 16) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.angles = int(head_dim * self.table)
        self.q_proj = nn.Linear(8, 3 * head_dim)
        self.k_proj = nn.Linear(8, 2 * head_dim)

    def states(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q and k, ``(batch, heads, sequence, head_dim)``, and the tables, ``(batch, sequence, angles)``."""
        heads = (-1, self.head_dim)
        q, k = (
            torch.unflatten(project(hidden_states), -1, heads).transpose(1, 2) for project in (self.q_proj, self.k_proj)
        )
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device, dtype=torch.float32)
        turns = positions[None, :, None] * torch.logspace(0, -2, self.angles, device=hidden_states.device)
        cos, sin = (table.expand(len(hidden_states), -1, -1) for table in (turns.cos(), turns.sin()))
        return q, k, cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """(-b, a) for the halves a and b."""
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def rotate_half_negated(x: Tensor) -> Tensor:
    """(b, -a) for the halves a and b."""
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((b, -a), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    """(-b, a) for the neighbours a and b."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _rotary(turn: Callable[[Tensor], Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + turn(x) * sin


def _leading(turn: Callable[[Tensor], Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    return torch.cat((_rotary(turn, x[..., :width], cos, sin), x[..., width:]), dim=-1)


def half_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotary(rotate_half, q, cos, sin), _rotary(rotate_half, k, cos, sin)


class Half(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return half_rotary(*self.states(hidden_states))


def partial_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _leading(rotate_half, q, cos, sin), _leading(rotate_half, k, cos, sin)


class Partial(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return partial_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)


def vision_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q_out, k_out = _rotary(rotate_half, q.float(), cos, sin), _rotary(rotate_half, k.float(), cos, sin)
    return q_out.to(q.dtype), k_out.to(k.dtype)


class Vision(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return vision_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def promoting_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotary(rotate_half, q, cos, sin).to(q.dtype), _rotary(rotate_half, k, cos, sin).to(k.dtype)


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
    return _rotary(rotate_half, q, cos, sin).to(dtype), _rotary(rotate_half, k, cos, sin).to(dtype)


class WideTables(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return wide_tables_rotary(*self.states(hidden_states))


def half_size_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotated(x: Tensor) -> Tensor:
        a, b = torch.chunk(x, 2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return rotated(q), rotated(k)


class HalfSize(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return half_size_rotary(*self.states(hidden_states))


def negated_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotary(rotate_half_negated, q, cos, sin), _rotary(rotate_half_negated, k, cos, sin)


class Negated(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return negated_rotary(*self.states(hidden_states))


def pairs_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotary(rotate_pairs, q, cos, sin), _rotary(rotate_pairs, k, cos, sin)


class Interleaved(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return pairs_rotary(*self.states(hidden_states))


def pairs_partial_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _leading(rotate_pairs, q, cos, sin), _leading(rotate_pairs, k, cos, sin)


class InterleavedPartial(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return pairs_partial_rotary(*self.states(hidden_states))


def pairs_wide_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    dtype, q, k = q.dtype, q.float(), k.float()
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotary(rotate_pairs, q, cos, sin).to(dtype), _rotary(rotate_pairs, k, cos, sin).to(dtype)


class InterleavedWide(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return pairs_wide_rotary(*self.states(hidden_states))


def pairs_wide_own_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q_out, k_out = _rotary(rotate_pairs, q.float(), cos, sin), _rotary(rotate_pairs, k.float(), cos, sin)
    return q_out.type_as(q), k_out.type_as(k)


class InterleavedWideOwn(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return pairs_wide_own_rotary(q, k, cos[0], sin[0])


def pairs_vision_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q_out, k_out = _rotary(rotate_pairs, q.float(), cos, sin), _rotary(rotate_pairs, k.float(), cos, sin)
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


def _first_half(table: Tensor, unsqueeze_dim: int) -> Tensor:
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)


def first_half_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = _first_half(cos, unsqueeze_dim), _first_half(sin, unsqueeze_dim)
    return _rotary(rotate_pairs, q, cos, sin), _rotary(rotate_pairs, k, cos, sin)


class FirstHalf(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return first_half_rotary(*self.states(hidden_states))


def first_half_partial_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = _first_half(cos, unsqueeze_dim), _first_half(sin, unsqueeze_dim)
    return _leading(rotate_pairs, q, cos, sin), _leading(rotate_pairs, k, cos, sin)


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
    return _rotary(rotate_pairs, x, cos, sin)


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

    def rotated(x: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)

    return rotated(q), rotated(k)


class HalfSizePairs(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return half_size_pairs_rotary(*self.states(hidden_states))


def matrix_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
    matrices = torch.stack((cos, -sin, sin, cos), dim=-1).view(*cos.shape, 2, 2).unsqueeze(unsqueeze_dim)
    q_rows, k_rows = (x.reshape(*x.shape[:-1], x.shape[-1] // 2, 1, 2) for x in (q, k))
    return (q_rows * matrices).sum(-1).flatten(-2), (k_rows * matrices).sum(-1).flatten(-2)


class Matrix(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return matrix_rotary(*self.states(hidden_states))


def complex_rotary(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], x.shape[-1] // 2, 2))
        return torch.view_as_real(numbers * freqs_cis[:, :, None, :]).flatten(3).type_as(x)

    return rotated(q), rotated(k)


class Complex(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return complex_rotary(q.transpose(1, 2), k.transpose(1, 2), torch.complex(cos.float(), sin.float()))


def latent_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = (table[..., : table.shape[-1] // 2].unsqueeze(unsqueeze_dim) for table in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return rotated(q), rotated(k)


class Latent(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return latent_rotary(*self.states(hidden_states))


def latent_full_table_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q, k = (torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) for x in (q, k))
    return _rotary(rotate_half, q, cos, sin), _rotary(rotate_half, k, cos, sin)


class LatentFullTable(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return latent_full_table_rotary(*self.states(hidden_states))


def single_rotary(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return _rotary(rotate_half, x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


class Single(Attention):
    def forward(self, hidden_states: Tensor) -> Tensor:
        q, _, cos, sin = self.states(hidden_states)
        return single_rotary(q.transpose(1, 2), cos, sin, unsqueeze_dim=2)


def gathering_rotary(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = (table[position_ids].unsqueeze(unsqueeze_dim) for table in (cos, sin))
    return _rotary(rotate_half, q, cos, sin), _rotary(rotate_half, k, cos, sin), _rotary(rotate_half, v, cos, sin)


class Gathering(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        positions = torch.arange(q.shape[-2], device=q.device).expand(len(q), -1)
        return gathering_rotary(q, k, -k, cos[0], sin[0], positions)


def sections_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    def merged(table: Tensor) -> Tensor:
        parts = torch.split(table, mrope_section * 2, dim=-1)
        return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1).unsqueeze(unsqueeze_dim)

    cos, sin = merged(cos), merged(sin)
    return _rotary(rotate_half, q, cos, sin), _rotary(rotate_half, k, cos, sin)


class Sections(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        cos, sin = (torch.stack((table, table.square(), table.abs())) for table in (cos, sin))
        return sections_rotary(q, k, cos, sin, [4, 2, 2])


def patches_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    def rotated(x: Tensor) -> Tensor:
        before = x.shape[-2] - sin.shape[-2]
        return torch.cat((x[..., :before, :], _rotary(rotate_half, x[..., before:, :], cos, sin)), dim=-2)

    return rotated(q), rotated(k)


class Patches(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return patches_rotary(q, k, cos[0, 1:], sin[0, 1:])


def unpaired_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    length = q.size(-2)
    q_out = q * cos[..., -length:, :] + rotate_half(q) * sin[..., -length:, :]
    return q_out, _rotary(rotate_half, k, cos, sin)


class Unpaired(Attention):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return unpaired_rotary(q[..., 1:, :], k, cos, sin)


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
    """How much is rotated is an attribute."""

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


def half_size_negated_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, a * (-sin) + b * cos), dim=-1).type_as(x)


class HalfSizeNegated(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, _, cos, sin = self.states(hidden_states)
        return half_size_negated_rotary(q.transpose(1, 2), cos[:1, :, None], sin[:1, :, None])


def half_size_pairs_wide_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[None, :, None], sin[None, :, None]

    def rotated(x: Tensor) -> Tensor:
        a, b = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
        return _turned_pairs(a, b, cos, sin).type_as(x)

    return rotated(q), rotated(k)


def _turned_pairs(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


class HalfSizePairsWide(Attention):
    table = 0.5

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = self.states(hidden_states)
        return half_size_pairs_wide_rotary(q.transpose(1, 2), k.transpose(1, 2), cos[0], sin[0])


def pairs_table_rotary(x: Tensor, rope_cache: Tensor) -> Tensor:
    width = 2 * rope_cache.shape[-2]
    a, b = torch.unflatten(x[..., :width], -1, (-1, 2)).unbind(-1)
    table = rope_cache[: len(x), :, None]
    return torch.cat((_turned_pairs(a, b, table[..., 0], table[..., 1]), x[..., width:]), dim=-1)


class PairsInOneTable(Attention):
    table = 0.25

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, _, cos, sin = self.states(hidden_states)
        return pairs_table_rotary(q.permute(2, 0, 1, 3), torch.stack((cos, sin), dim=-1).transpose(0, 1))


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
    """Takes positions too."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        cache = torch.stack((_turns(8).cos(), _turns(8).sin()), dim=-1)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        cache = self.cache[: x.shape[1]] if input_pos is None else self.cache[input_pos]
        cache = cache.view(-1, x.shape[1], 1, x.shape[3] // 2, 2)
        a, b = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
        return _turned_pairs(a, b, cache[..., 0], cache[..., 1]).type_as(x)


class ComplexNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.freqs_cis = torch.polar(torch.ones(32, 8), _turns(8))

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(torch.unflatten(x.float(), -1, (-1, 2)))
        return torch.view_as_real(numbers * self.freqs_cis[: x.shape[1], None]).flatten(-2).type_as(x)


class HeadsFirst(nn.Module):
    """With an angle for each element, and no cast."""

    cos_cached: Tensor
    sin_cached: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_cached", _turns(8).repeat(1, 2).cos(), persistent=False)
        self.register_buffer("sin_cached", _turns(8).repeat(1, 2).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return _rotary(rotate_half, x, self.cos_cached[: x.shape[-2]], self.sin_cached[: x.shape[-2]])


class ModuleOfHalves(Attention):
    """A module rotates: one that holds its tables."""

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
