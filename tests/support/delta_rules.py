"""The rows of gated delta rules, one for each variant, and models that have them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug_verify import Tolerance

from .recurrences import SINGLE, Recurrence
from .tiny import BASE, EXPERTS, HEAD

TOLERANCE = Tolerance(4.0, 111.0, by_row=False)
"""The recogniser's tolerance."""

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


def tensors(
    variant: str = "head",
    dtype: torch.dtype = SINGLE,
    g: torch.dtype = SINGLE,
    *,
    shape: tuple[int, int, int, int] = (2, 21, 2, 2),
    channels: tuple[int, int] = (6, 5),
    optional: bool = True,
) -> dict[str, Tensor]:
    """Arguments of `gated_delta_rule` by name.

    *shape* is ``(batch, tokens, key heads, heads of each)``, *channels* are those of keys and of values, and *optional*
    says whether there is an initial state.
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
    return arguments | ({"initial_state": normal(batch, heads, keys, values)} if optional else {})


ROWS = {
    f"gated_delta_rule-{variant}": Recurrence(
        op="gated_delta_rule",
        tensors=functools.partial(tensors, variant),
        tolerance=TOLERANCE,
        how={"variant": variant, "normalised": True},
        others=[{"variant": variant}],
        shapes=[{"shape": s} for s in ((2, 21, 2, 2), (1, 1, 1, 1), (2, 64, 1, 3), (1, 65, 2, 1), (3, 150, 2, 3))],
        long={"shape": (2, 70, 2, 2)},
        tiny={"shape": (1, 3, 1, 1), "channels": (3, 2)},
        short=[{"shape": (1, 16, 1, 1)}],
        step={"shape": (3, 1, 2, 2)},
        empty=[{"shape": (2, 0, 2, 2)}, {"shape": (0, 5, 2, 2)}],
        optional=("initial_state",),
        two=("v", "k"),
        wanted=[("k",), ("g", "initial_state"), ("v", "beta")],
        decay=("g", (slice(None), slice(3, None, 9))),
        kept=({"shape": (1, 700, 2, 2)}, [(2, 4, 6, 5)]),
        npu=True,
    )
    for variant in ("head", "channel")
}
