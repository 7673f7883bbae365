"""Inputs of gated delta rules for tests, and how exact kernels are on them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug_gated_delta_rule import reference
from fuseplug_verify import Tolerance

TOLERANCE = Tolerance(4.0, 111.0, by_row=False)
"""As the recogniser has it."""

BF16, HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64


def tensors(
    variant: str = "head",
    dtype: torch.dtype = SINGLE,
    g: torch.dtype = SINGLE,
    *,
    shape: tuple[int, int, int, int] = (2, 21, 2, 2),
    channels: tuple[int, int] = (6, 5),
    state: bool = True,
) -> dict[str, Tensor]:
    """Arguments of `gated_delta_rule` by name.

    *shape* is ``(batch, tokens, key heads, heads of each)``, and *channels* are those of keys and of values.
    """
    batch, tokens, key_heads, repeats = shape
    keys, values = channels
    heads = key_heads * repeats
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    arguments = {
        "q": normal(batch, tokens, key_heads, keys).to(dtype),
        "k": functional.normalize(normal(batch, tokens, key_heads, keys), dim=-1).to(dtype),
        "v": normal(batch, tokens, heads, values).to(dtype),
        "g": -normal(batch, tokens, heads, *([keys] if variant == "channel" else [])).abs().to(g),
        "beta": (2 * normal(batch, tokens, heads).sigmoid()).to(dtype),
    }
    return arguments | ({"initial_state": normal(batch, heads, keys, values)} if state else {})


def both(kernel, variant: str = "head", **how):
    """The function of the module *kernel*, and the reference."""
    return tuple(functools.partial(m.gated_delta_rule, variant=variant, **how) for m in (kernel, reference))
