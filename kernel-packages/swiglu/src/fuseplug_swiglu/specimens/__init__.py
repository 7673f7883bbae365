"""Small gated MLPs in plain PyTorch, as models write them, to check the kernels of this package on."""

from __future__ import annotations

import math

from torch import nn
from torch.nn import functional

from . import mlps
from .activations import GELUErf, GELUFast, GELUNew, QuickGELU, ReLU2, Swish

__all__ = ["specimens"]


def specimens() -> list[nn.Module]:
    """At least one module for each activation, variant, layout and place that is claimed; some have odd widths."""
    return [
        mlps.Separate(nn.SiLU()),
        mlps.Separate(nn.SiLU(), hidden=7, inner=13, bias=True),
        mlps.Separate(functional.silu),
        *map(mlps.Separate, (nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.Sigmoid())),
        *map(mlps.Separate, (ReLU2(), GELUNew(), GELUFast(), GELUErf(), QuickGELU(), Swish())),
        *(mlps.InOne(nn.SiLU(), layout) for layout in ("gate-first", "gate-second", "interleaved", "viewed")),
        mlps.InOne(nn.GELU(), "gate-second", hidden=7, inner=13),
        mlps.Wide(),
        mlps.Multiplied(),
        mlps.LearnedScale(),
        mlps.Sparse(nn.GELU("tanh"), 0.9),
        mlps.Sparse(nn.GELU("tanh"), 0.0),
        *(mlps.Clamped(when, limit) for when in ("before", "after") for limit in (1.0, math.inf)),
        mlps.Offset(),
        mlps.DropoutBetween(),
        mlps.DropoutTwice(),
        mlps.DropoutAfter(),
        mlps.NormBetween(),
        mlps.NormBefore(),
        mlps.DropoutsAndNorm(nn.LayerNorm(mlps.INNER)),
        mlps.DropoutsAndNorm(nn.Identity()),
        mlps.WidePath(),
        mlps.GateOnly(),
        mlps.GateOnlyInOne(),
    ]
