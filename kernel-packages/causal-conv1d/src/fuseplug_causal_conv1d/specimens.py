"""Small modules that the kernels here fuse, written as in models: one for each form, to test kernels on."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["specimens"]

_ACTIVATIONS = {"silu": functional.silu}


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """The function as models write it, with the shapes of `fuseplug_causal_conv1d.reference.causal_conv1d`."""
    _, channels, tokens = hidden_states.shape
    out = functional.conv1d(
        hidden_states.to(weight.dtype), weight.unsqueeze(1), bias, padding=weight.shape[-1] - 1, groups=channels
    )[:, :, :tokens]
    if activation is not None:
        out = _ACTIVATIONS[activation](out)
    return out.to(hidden_states.dtype)


class Mixer(nn.Module):
    """Projects, convolves and activates, as gated delta nets and state spaces do.

    Args:
        channels: The number of channels.
        width: The width of the convolution.
        bias: Whether the convolution has a bias.
    """

    def __init__(self, channels: int = 12, width: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        self.in_proj = nn.Linear(8, channels)
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1, bias=bias)
        self.activation = "silu"

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self.in_proj(hidden_states).transpose(1, 2)
        weight = self.conv1d.weight.squeeze(1)
        return causal_conv1d_fn(x, weight, self.conv1d.bias, activation=self.activation).transpose(1, 2)


class ShortConv(nn.Module):
    """Convolves a part of a projection's output, without an activation."""

    def __init__(self, channels: int = 10, width: int = 3, *, bias: bool = False) -> None:
        super().__init__()
        self.in_proj = nn.Linear(8, 2 * channels)
        self.conv = nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, gate = self.in_proj(hidden_states).transpose(-1, -2).chunk(2, dim=-2)
        y: Tensor = gate * causal_conv1d_fn(x, self.conv.weight.squeeze(1), self.conv.bias)
        return y.transpose(-1, -2)


def specimens() -> list[nn.Module]:
    """One module for each variant, with a bias and without."""
    return [Mixer(), Mixer(bias=True, width=2), ShortConv(), ShortConv(bias=True, width=7)]
