"""Gates and ups to multiply, the options of every variant, and how near to the truth each backend must be."""

from __future__ import annotations

import torch

from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_swiglu import reference
from fuseplug_swiglu.reference import LAYOUTS, VARIANTS
from fuseplug_verify import Tolerance

from . import backends

INNER = 20
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (BF16, HALF, SINGLE)
EVERY_LAYOUT = (None, *LAYOUTS)
"""``None`` stands for gate and up in separate tensors."""

NUMBERS = {"limit": 0.75, "scale": 0.4, "sparsity": 0.6}
TOLERANCE = {
    "triton": Tolerance(roundings=1.0, working_roundings=16.0),  # one to the dtype of a result, the others in float32
    "inductor": Tolerance(roundings=4.0, working_roundings=16.0),
    "npu": Tolerance(roundings=6.0, working_roundings=24.0),
}


def is_served(activation: str, variant: str) -> bool:
    """Whether the chosen backend computes this gate; others are declined, see tests/backends/test_one_row.py."""
    if backends.NAME == "npu":
        from fuseplug_swiglu.backends import npu

        return npu.unsupported(activation, variant) is None
    if backends.NAME == "triton":
        from fuseplug_backends.triton import FORMULAS

        return ACTIVATIONS[activation].formula in FORMULAS
    return True


def options(activation="silu", variant="plain", layout=None, **others):
    """The arguments of `swiglu` that are not tensors."""
    steep = backends.NAME != "npu" or VARIANTS[variant].clamp
    options = {"activation": activation, "variant": variant, "beta": 1.25 if steep else 1.0}
    options |= {} if layout is None else {"layout": layout}
    return options | {name: NUMBERS[name] for name in VARIANTS[variant].needs} | others


def tensors(layout=None, dtype=SINGLE, up=None, shape=(2, 3, INNER)):
    """Gate and up, or both in one tensor: rows that reach the limits, rows near zero, and rows of zeros."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor((3.0, 0.25, 0.0)).repeat(shape[-2])[: shape[-2], None] if len(shape) > 1 else 1.0
    shape = (*shape[:-1], shape[-1] * (1 if layout is None else 2)) if shape else shape
    dtypes = {"gate": dtype, "up": up or dtype} if layout is None else {"gate": dtype}
    return {name: (magnitudes * torch.randn(shape, generator=generator)).to(which) for name, which in dtypes.items()}


def both(module, view=lambda x: x, **options):
    """The function of the backend's *module* and the reference, both called with a view of each tensor."""

    def called(function):
        return lambda **tensors: function(**{name: view(t) for name, t in tensors.items()}, **options)

    return called(module.swiglu), called(reference.swiglu)
