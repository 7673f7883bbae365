"""The row of Mamba-2's recurrence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fuseplug_verify import Tolerance

from .recurrences import SINGLE, Recurrence
from .tiny import BASE

TOLERANCE = Tolerance(8.0, 28.0, by_row=False)
"""The recogniser's tolerance."""


MAMBA = {"mamba_d_state": 4, "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
MODELS = {
    "mamba2": BASE | {"state_size": 4, "num_heads": 16, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_h1": BASE | MAMBA | {"mamba_d_ssm": 128},
    "bamba": BASE | MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": BASE
    | MAMBA
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32},
    "nemotron_h": BASE
    | {"ssm_state_size": 4, "mamba_num_heads": 16, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8}
    | {"hybrid_override_pattern": "M*", "mamba_hidden_act": "silu"},
    "zamba2": BASE
    | {"mamba_d_state": 4, "mamba_headdim": 8, "n_mamba_heads": 16, "mamba_ngroups": 2, "chunk_size": 8}
    | {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4},
}
"""The arguments of each config."""


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

    *shape* is ``(batch, tokens, heads, width)``; *wide* is the dtype of arguments that do not depend on the token;
    *optional* says whether there are D, dt_bias and initial_states.
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


ROW = Recurrence(
    op="ssd",
    tensors=tensors,
    tolerance=TOLERANCE,
    how={"dt_softplus": True},
    others=[
        {"dt_softplus": False},
        *({"dt_softplus": True, "dt_limit": limit} for limit in ((0.0, 0.1), (-math.inf, math.inf), (0.5, 1.0))),
    ],
    shapes=[
        *({"shape": shape} for shape in ((2, 21, 4, 3), (2, 64, 2, 3))),
        *({"shape": shape, "groups": 1} for shape in ((1, 1, 1, 1), (1, 65, 6, 7))),
        {"shape": (3, 150, 6, 2), "groups": 3},
    ],
    long={"shape": (2, 134, 4, 3)},
    tiny={"shape": (1, 3, 2, 1), "groups": 1, "states": 2},
    short=[{"shape": shape, "groups": 1} for shape in ((1, 1, 1, 1), (1, 64, 2, 1), (2, 70, 2, 3))],
    step={"shape": (3, 1, 4, 3)},
    empty=[{"shape": (2, 0, 4, 3)}, {"shape": (0, 5, 4, 3)}],
    optional=("D", "dt_bias", "initial_states"),
    two=("x", "C"),
    wanted=[("B",), ("A", "D"), ("dt", "dt_bias"), ("x", "C", "initial_states")],
    decay=("A", 1),
    kept=({"shape": (2, 134, 4, 3)}, [(3, 2, 4, 3, 3)]),
    npu=True,
)
