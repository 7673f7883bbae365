"""Inputs of selective scans for tests, and how exact kernels are on them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fuseplug_selective_scan import reference
from fuseplug_verify import Tolerance

TOLERANCE = Tolerance(8.0, 25.0, by_row=False)
"""As the recogniser has it."""

BF16, HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64


def tensors(
    dtype: torch.dtype = SINGLE,
    wide: torch.dtype = SINGLE,
    *,
    shape: tuple[int, int, int] = (2, 5, 37),
    states: int = 3,
    optional: bool = True,
) -> dict[str, Tensor]:
    """Arguments of `selective_scan` by name.

    *shape* is ``(batch, channels, tokens)``; *wide* is the dtype of what does not depend on the token; *optional* says
    whether there are D, z, delta_bias and a state before.
    """
    batch, channels, tokens = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    arguments = {
        "x": normal(batch, tokens, channels).to(dtype).transpose(1, 2),
        "dt": normal(batch, channels, tokens).abs().to(dtype),
        "A": -normal(channels, states).exp().to(wide),
        "B": normal(batch, tokens, states).to(dtype).transpose(1, 2),
        "C": normal(batch, tokens, states).to(dtype).transpose(1, 2),
    }
    more = {
        "D": normal(channels).to(wide),
        "z": normal(batch, tokens, channels).to(dtype).transpose(1, 2),
        "delta_bias": normal(channels).abs().to(wide),
        "initial_state": normal(batch, channels, states),
    }
    return arguments | (more if optional else {})


def both(kernel, **how):
    """The function of the module *kernel*, and the reference."""
    return tuple(functools.partial(module.selective_scan, **how) for module in (kernel, reference))
