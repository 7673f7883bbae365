"""Gated MLPs as models write them, with various places of gate and up, and various steps beside the op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .activations import GELUNew, ReLU2

HIDDEN, INNER = 24, 40


class Separate(nn.Module):
    """Like Llama's, with any activation."""

    def __init__(
        self, act: Callable[[Tensor], Tensor], hidden: int = HIDDEN, inner: int = INNER, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.act_fn = act

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class InOne(nn.Module):
    """Like Phi-3's, Moonshine's, GPT-OSS's or Moshi's, depending on where the gate is."""

    def __init__(self, act: nn.Module, layout: str, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, 2 * inner)
        self.fc2 = nn.Linear(inner, hidden)
        self.activation_fn = act
        self.layout = layout

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        both = self.fc1(x)
        if self.layout == "interleaved":
            gate, up = both[..., ::2], both[..., 1::2]
        elif self.layout == "viewed":
            gate, up = both.view(*both.shape[:-1], 2, -1).unbind(-2)
        elif self.layout == "gate-first":
            gate, up = both.chunk(2, dim=-1)
        else:
            up, gate = both.chunk(2, dim=-1)
        return self.fc2(self.activation_fn(gate) * up)


class Wide(Separate):
    """Like Beam's: computes the activation and the product in float32."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((self.act_fn(gate.float()) * up.float()).to(gate.dtype))


class Multiplied(Separate):
    """Like Falcon-H1's: calls up first; one multiplier is 1, and may change."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.gate_multiplier, self.down_multiplier = 1.0, 0.5

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class LearnedScale(Separate):
    """Like Inkling's: scales the output by a parameter."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.global_scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.global_scale


class Sparse(Separate):
    """Like Gemma 3n's: keeps only the excess of the gate over a quantile of its row."""

    def __init__(self, act: nn.Module, sparsity: float) -> None:
        super().__init__(act)
        self.activation_sparsity = sparsity

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        gate = self.gate_proj(x)
        if self.activation_sparsity > 0.0:
            share = torch.tensor(self.activation_sparsity, dtype=torch.float32, device=gate.device)
            deviations = (torch.erfinv(2 * share - 1) * math.sqrt(2)).type(gate.dtype)
            cutoff = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * deviations
            gate = functional.relu(gate - cutoff)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class Clamped(Separate):
    """Like DeepSeek-V4's or Step-3.7's: clamps before the activation or after it."""

    def __init__(self, when: str, limit: float) -> None:
        super().__init__(nn.SiLU())
        self.when, self.limit = when, limit

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        gate = self.gate_proj(x)
        if self.when == "before":
            gate = self.act_fn(gate.clamp(max=self.limit))
        else:
            gate = self.act_fn(gate).clamp(max=self.limit)
        return self.down_proj(gate * self.up_proj(x).clamp(min=-self.limit, max=self.limit))


class Offset(nn.Module):
    """Like GPT-OSS's, but dense: clamps, adds 1 to up, and uses a sigmoid of its own steepness."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.limit = 1.702, 1.0
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * INNER)
        self.down_proj = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return self.down_proj((up + 1) * (gate * torch.sigmoid(gate * self.alpha)))


class DropoutBetween(Separate):
    """Like T5Gemma's: applies dropout to the product."""

    def __init__(self) -> None:
        super().__init__(nn.GELU("tanh"))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class DropoutTwice(nn.Module):
    """Like that of Phi-4's audio encoder: a norm comes first, the gate second, and dropout before and after down."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(HIDDEN)
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * INNER)
        self.down_proj = nn.Linear(INNER, HIDDEN)
        self.act_fn = nn.SiLU()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        up, gate = self.gate_up_proj(self.layer_norm(x)).chunk(2, dim=-1)
        return self.dropout(self.down_proj(self.dropout(up * self.act_fn(gate))))


class DropoutAfter(Separate):
    """Like Seed-OSS's: applies dropout to the output, by a function."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.residual_dropout = 0.1

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return functional.dropout(y, p=self.residual_dropout, training=self.training)


class NormBetween(Separate):
    """Like BitNet's: normalises the product."""

    def __init__(self) -> None:
        super().__init__(ReLU2())
        self.ffn_sub_norm = nn.RMSNorm(INNER)

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        return self.down_proj(self.ffn_sub_norm(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class NormBefore(Separate):
    """Like GLM-4V's patch merger: a projection, a norm and another activation come first."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.post_projection_norm = nn.LayerNorm(HIDDEN)
        self.act1 = nn.GELU()

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        x = self.act1(self.post_projection_norm(self.proj(x)))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DropoutsAndNorm(Separate):
    """Like timm's: applies dropout to the product, then the norm, if it is one, and dropout to the output."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(nn.SiLU())
        self.norm = norm
        self.drop1, self.drop2 = nn.Dropout(0.1), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        x = self.drop1(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        x = self.down_proj(self.norm(x))
        return self.drop2(x)


class WidePath(nn.Module):
    """Like T5's: the last projection may be kept in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(HIDDEN, INNER, bias=False)
        self.wi_1 = nn.Linear(HIDDEN, INNER, bias=False)
        self.wo = nn.Linear(INNER, HIDDEN, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.act = GELUNew()

    def forward(self, x: Tensor) -> Any:
        """Apply the MLP."""
        x = self.dropout(self.act(self.wi_0(x)) * self.wi_1(x))
        if isinstance(self.wo.weight, Tensor) and self.wo.weight.dtype not in (x.dtype, torch.int8):
            x = x.to(self.wo.weight.dtype)
        return self.wo(x)


class GateOnly(nn.Module):
    """Like CPM-Ant's: the projection that follows is elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.w_0 = nn.Linear(HIDDEN, INNER, bias=False)
        self.w_1 = nn.Linear(HIDDEN, INNER, bias=False)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Any:
        """Gate."""
        return self.act(self.w_0(x)) * self.w_1(x)


class GateOnlyInOne(nn.Module):
    """Like CLVP's: the projection that follows is elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, 2 * INNER)
        self.activation_fn = nn.GELU()

    def forward(self, x: Tensor) -> Any:
        """Gate."""
        up, gate = self.proj(x).chunk(2, dim=-1)
        return up * self.activation_fn(gate)
