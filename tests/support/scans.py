"""The row of selective scans."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseplug_verify import Tolerance

from .recurrences import SINGLE, Recurrence
from .tiny import BASE

TOLERANCE = Tolerance(8.0, 25.0, by_row=False)
"""The recogniser's tolerance."""


MODELS = {
    "mamba": (BASE | {"state_size": 4}, 2, 1),
    "zamba": (
        BASE
        | {"num_key_value_heads": 4, "mamba_d_state": 4, "mamba_dt_rank": 4, "hidden_act": "silu"}
        | {"layers_block_type": ["hybrid", "hybrid"], "use_mamba_kernels": False},
        2,
        2,
    ),
    "jamba": (
        BASE
        | {"mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
        | {"num_experts": 1, "num_experts_per_tok": 1},
        1,
        1,
    ),
    "falcon_mamba": (BASE | {"state_size": 4}, 2, 1),
}
"""The arguments of each config, the number of mixers, and the number of scans in each mixer."""


def tensors(
    dtype: torch.dtype = SINGLE,
    wide: torch.dtype = SINGLE,
    *,
    shape: tuple[int, int, int] = (2, 5, 37),
    states: int = 3,
    optional: bool = True,
) -> dict[str, Tensor]:
    """Arguments of `selective_scan` by name.

    *shape* is ``(batch, channels, tokens)``; *wide* is the dtype of arguments that do not depend on the token;
    *optional* says whether there are D, z, delta_bias and an initial state.
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


ROW = Recurrence(
    op="selective_scan",
    tensors=tensors,
    tolerance=TOLERANCE,
    how={"delta_softplus": True},
    others=[{"delta_softplus": False}],
    shapes=[{"shape": shape} for shape in ((2, 5, 21), (1, 1, 1), (2, 3, 32), (1, 7, 33), (3, 20, 70))],
    long={"shape": (2, 5, 70)},
    tiny={"shape": (1, 2, 3), "states": 2},
    short=[{"shape": shape} for shape in ((1, 1, 1), (1, 3, 8), (2, 3, 40))],
    step={"shape": (3, 7, 1)},
    empty=[{"shape": (2, 5, 0)}, {"shape": (0, 5, 3)}],
    optional=("D", "z", "delta_bias", "initial_state"),
    two=("x", "C"),
    wanted=[("B",), ("A", "D"), ("dt", "delta_bias"), ("x", "C", "z")],
    decay=("A", (slice(None), 1)),
    kept=({"shape": (2, 5, 70)}, [(3, 2, 3, 5)]),
)
