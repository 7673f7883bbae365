"""Small modules that the kernel fuses, written as models write them. The conformance kit uses them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WrittenOut(nn.Module):
    """A norm like Cohere's: in float32, and without a bias."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """*hidden_states* and the result are ``(..., width)``."""
        wide = hidden_states.to(torch.float32)
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        normal = (wide - mean) * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight.to(torch.float32) * normal).to(hidden_states.dtype)


def specimens() -> list[nn.Module]:
    """At least one specimen for each variant, with odd widths and other dtypes, too."""
    return [WrittenOut(48), nn.LayerNorm(48), nn.LayerNorm(33, bias=False).to(torch.bfloat16), WrittenOut(31, 1e-6)]
