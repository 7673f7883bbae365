"""The parts that the rotary functions here share: how halves and pairs are turned, and a rotation put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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


def turned_halves(points: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """The *points* (a, b) turned, as two halves."""
    a, b = points
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def turned_pairs(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The points (a, b) turned, as neighbours."""
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rotary(turn: Callable[[Tensor], Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """All of *x* rotated."""
    return x * cos + turn(x) * sin


def leading(turn: Callable[[Tensor], Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """*x* with its first elements rotated, as many as the tables have angles."""
    width = cos.shape[-1]
    return torch.cat((rotary(turn, x[..., :width], cos, sin), x[..., width:]), dim=-1)
