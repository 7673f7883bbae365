"""The attention whose states the specimens rotate."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Has q with three heads and k with two rotated, as the forward of an attention does.

    Args:
        head_dim: The size of a head.
    """

    table = 1.0
    """The number of angles, as a share of head_dim."""

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
