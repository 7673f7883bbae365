"""Activations as models write them, each a module of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class ReLU2(nn.Module):
    """As in Primer."""

    def forward(self, x: Tensor) -> Tensor:
        """Activate."""
        return functional.relu(x).square()


class GELUNew(nn.Module):
    """As in GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        """Activate."""
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GELUFast(nn.Module):
    """As in GPT-J."""

    def forward(self, x: Tensor) -> Tensor:
        """Activate."""
        return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


class GELUErf(nn.Module):
    """As in BERT's original code."""

    def forward(self, x: Tensor) -> Tensor:
        """Activate."""
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class QuickGELU(nn.Module):
    """As in CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        """Activate."""
        return x * torch.sigmoid(1.702 * x)


class Swish(nn.Module):
    """SiLU, rounded twice."""

    def forward(self, x: Tensor) -> Tensor:
        """Activate."""
        return x * torch.sigmoid(x)
