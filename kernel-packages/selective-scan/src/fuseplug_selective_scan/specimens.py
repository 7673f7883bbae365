"""Small modules for testing kernels, written as in models, which the kernels of this package fuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["specimens"]


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """The selective scan as Mamba writes it, with the shapes of `fuseplug_selective_scan.reference.selective_scan`."""
    if kwargs.get("seq_idx") is not None:
        raise ValueError("packed sequences cannot be kept apart")
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    decays = torch.exp(A[None, :, None, :] * dt[:, :, :, None])
    written = dt[:, :, :, None] * B.transpose(1, 2)[:, None].float() * hidden_states[:, :, :, None].float()
    state = torch.zeros_like(written[:, :, 0])
    results = []
    for token in range(hidden_states.shape[-1]):
        state = decays[:, :, token] * state + written[:, :, token]
        results.append(torch.matmul(state.to(hidden_states.dtype), C[:, :, token].unsqueeze(-1))[:, :, 0])
    result = torch.stack(results, dim=-1)
    if D is not None:
        result = result + hidden_states * D[None, :, None]
    if z is not None:
        result = result * functional.silu(z)
    return (result, state) if return_last_state else result


class Mixer(nn.Module):
    """Projects tokens, and mixes them by a selective scan.

    Args:
        gated: Whether there are a gate and a bias of the steps.
    """

    def __init__(self, *, gated: bool = True) -> None:
        super().__init__()
        self.gated, self.channels, self.states = gated, 6, 4
        self.in_proj = nn.Linear(8, 3 * self.channels)
        self.x_proj = nn.Linear(8, 2 * self.states)
        self.A_log = nn.Parameter(torch.arange(1.0, self.states + 1).log().repeat(self.channels, 1))
        self.D = nn.Parameter(torch.ones(self.channels))
        self.dt_bias = nn.Parameter(torch.linspace(-3, 0, self.channels))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        x, dt, z = self.in_proj(hidden_states).transpose(1, 2).chunk(3, dim=1)
        B, C = self.x_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
        A = -torch.exp(self.A_log.float())
        D = self.D.float()
        if self.gated:
            rest = {"z": z, "delta_bias": self.dt_bias.float(), "delta_softplus": True}
            result: Tensor = selective_scan(x, dt, A, B, C, D, **rest, **kwargs)
        else:
            result = selective_scan(x, functional.softplus(dt), A, B, C, D, **kwargs)
        return result.transpose(1, 2)


def specimens() -> list[nn.Module]:
    """One module with a gate and a bias, and one without."""
    return [Mixer(), Mixer(gated=False)]
