"""Small modules for testing kernels, written as in models, which the kernels of this package fuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["specimens"]


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """The chunk scan as Mamba-2 writes it, with the shapes of `fuseplug_ssd.reference.ssd`."""
    batch, tokens, heads, width = hidden_states.shape
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    x = hidden_states.float()
    B, C = (t.float().repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    x_c, a, B, C = (_chunked(t, chunk_size) for t in (x * dt[..., None], A.float() * dt, B, C))
    a = a.permute(0, 3, 1, 2)
    sums = torch.cumsum(a, dim=-1)
    below = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    rows = a.unsqueeze(-1).expand(*a.shape, chunk_size).masked_fill(~below.tril(-1), 0)
    pairs = torch.exp(torch.cumsum(rows, dim=-2).masked_fill(~below, -torch.inf))
    weights = torch.einsum("bclhn,bcshn->bhcls", C, B) * pairs
    result = torch.einsum("bhcls,bcshp->bclhp", weights, x_c)
    written = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, pairs[..., -1, :], x_c)
    state = torch.zeros_like(written[:, 0]) if initial_states is None else initial_states.float()
    states = []
    for chunk in range(written.shape[1]):
        states.append(state)
        state = state * torch.exp(sums[:, :, chunk, -1])[..., None, None] + written[:, chunk]
    read = torch.einsum("bclhn,bchpn->bclhp", C, torch.stack(states, dim=1))
    result = result + read * torch.exp(sums).permute(0, 2, 3, 1)[..., None]
    result = result.reshape(batch, -1, heads, width)[:, :tokens]
    if D is not None:
        result = result + x * D[:, None]
    return (result, state) if return_final_states else result


def _chunked(tensor: Tensor, size: int) -> Tensor:
    rest = -tensor.shape[1] % size
    padded = functional.pad(tensor, (0,) * (2 * (tensor.dim() - 2)) + (0, rest))
    return padded.reshape(len(tensor), -1, size, *tensor.shape[2:])


class Mixer(nn.Module):
    """Projects tokens, and mixes them by a chunk scan.

    Args:
        skips: Whether there are a skip and a bias of the steps.
    """

    def __init__(self, *, skips: bool = True) -> None:
        super().__init__()
        self.skips, self.heads, self.width, self.groups, self.states = skips, 4, 3, 2, 4
        # No model calls it without a skip; the recogniser's example has chunks of 16 tokens there.
        self.chunk_size = 4 if skips else 16
        self.sizes = [self.heads * self.width, self.groups * self.states, self.groups * self.states, self.heads]
        self.in_proj = nn.Linear(8, sum(self.sizes))
        self.A_log = nn.Parameter(torch.arange(1.0, self.heads + 1).log())
        self.D = nn.Parameter(torch.ones(self.heads))
        self.dt_bias = nn.Parameter(torch.linspace(-3, 0, self.heads))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        x, B, C, dt = torch.split(self.in_proj(hidden_states), self.sizes, dim=-1)
        A = -torch.exp(self.A_log.float())
        x = x.view(*x.shape[:-1], self.heads, self.width)
        B, C = (t.view(*t.shape[:-1], self.groups, self.states) for t in (B, C))
        if self.skips:
            result: Tensor = chunk_scan(
                x, dt, A, B, C, self.chunk_size, self.D, dt_bias=self.dt_bias, dt_softplus=True, **kwargs
            )
        else:
            result = chunk_scan(x, dt.abs(), A, B, C, chunk_size=self.chunk_size, **kwargs)
        return result.flatten(2)


def specimens() -> list[nn.Module]:
    """One module with a skip and a bias, and one without."""
    return [Mixer(), Mixer(skips=False)]
