"""Inputs of gated delta rules for tests, how exact kernels are on them, and models that have them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug_gated_delta_rule import reference
from fuseplug_verify import Tolerance

from .tiny import BASE, EXPERTS, HEAD

TOLERANCE = Tolerance(4.0, 111.0, by_row=False)
"""As the recogniser has it."""

LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
NET = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MODELS = {
    "qwen3_5_text": (BASE | HEAD | LAYERS | NET, "head"),
    "kimi_linear": (
        BASE
        | LAYERS
        | EXPERTS
        | {"linear_num_heads": 2, "linear_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 2},
        "channel",
    ),
    "qwen3_next": (BASE | HEAD | LAYERS | NET | {"mlp_only_layers": [0, 1]}, "head"),
}
"""The arguments of each config, and the variant."""

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
