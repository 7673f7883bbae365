"""Inputs of causal convolutions for tests, and how exact kernels must be on them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fuseplug_causal_conv1d import reference
from fuseplug_verify import Tolerance

TOLERANCE = Tolerance(4.0, 48.0)
"""The recogniser's tolerance for a few hundred tokens."""

BF16, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
PAIRS = [(SINGLE, SINGLE), (BF16, BF16), (HALF, HALF), (BF16, SINGLE), (HALF, SINGLE), (SINGLE, BF16)]
"""The dtypes of the input and of the weight."""


def tensors(
    x: torch.dtype = SINGLE,
    weight: torch.dtype | None = None,
    *,
    shape: tuple[int, int, int] = (2, 6, 11),
    width: int = 4,
    bias: bool = True,
) -> dict[str, Tensor]:
    """Arguments of `causal_conv1d` by name; *shape* is ``(batch, channels, tokens)``; channels are adjacent."""
    batch, channels, tokens = shape
    generator = torch.Generator().manual_seed(0)

    def normal(dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    arguments = {
        "x": normal(x, batch, tokens, channels).transpose(1, 2),
        "weight": normal(weight or x, channels, width),
    }
    return arguments | ({"bias": normal(weight or x, channels)} if bias else {})


def both(kernel, variant: str = "silu"):
    """The function of the module *kernel*, and the reference."""
    return tuple(functools.partial(m.causal_conv1d, variant=variant) for m in (kernel, reference))
