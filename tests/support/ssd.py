"""Inputs of Mamba-2's recurrence for tests, and how exact kernels are on them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fuseplug_ssd import reference
from fuseplug_verify import Tolerance

TOLERANCE = Tolerance(8.0, 28.0, by_row=False)
"""As the recogniser has it."""

BF16, HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64


def tensors(
    dtype: torch.dtype = SINGLE,
    wide: torch.dtype = SINGLE,
    *,
    shape: tuple[int, int, int, int] = (2, 37, 4, 3),
    groups: int = 2,
    states: int = 3,
    optional: bool = True,
) -> dict[str, Tensor]:
    """Arguments of `ssd` by name.

    *shape* is ``(batch, tokens, heads, width)``; *wide* is the dtype of what does not depend on the token; *optional*
    says whether there are D, dt_bias and initial_states.
    """
    batch, tokens, heads, width = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    mixed = normal(batch, tokens, heads * width + 2 * groups * states).to(dtype)
    x, B, C = mixed.split([heads * width, groups * states, groups * states], -1)
    arguments = {
        "x": x.unflatten(-1, (heads, width)),
        "dt": normal(batch, tokens, heads).abs().to(dtype),
        "A": -torch.linspace(-2, 1, heads).exp().to(wide),
        "B": B.unflatten(-1, (groups, states)),
        "C": C.unflatten(-1, (groups, states)),
    }
    more = {
        "D": normal(heads).to(wide),
        "dt_bias": normal(heads).abs().to(wide),
        "initial_states": normal(batch, heads, width, states),
    }
    return arguments | (more if optional else {})


def both(kernel, **how):
    """The function of the module *kernel*, and the reference."""
    return tuple(functools.partial(module.ssd, **how) for module in (kernel, reference))
