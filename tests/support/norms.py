"""Rows, weights and gates for norms, and the functions that are compared."""

import itertools

import torch

from fuseplug_rmsnorm import reference
from fuseplug_rmsnorm.reference import VARIANTS
from fuseplug_verify import Tolerance

WIDTH = 48
TOLERANCE = Tolerance(roundings=4.0, working_roundings=20.0)
HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BF16, SINGLE)
PAIRS = [*itertools.product(DTYPES, DTYPES), *((dtype, None) for dtype in DTYPES)]
"""The dtypes of x and of the weight; ``None`` means no weight."""

KINDS = ["llama", "gemma", "gemma-input-scaled", "gate-first", "gated-silu", "gated-sigmoid-cast-last"]
"""One variant for each kind of thing that Triton's programs do."""


def tensors(variant="llama", x=SINGLE, weight=SINGLE, gate=None, shape=(2, 6, WIDTH), scale=1.0):
    """Rows of several magnitudes, one of them zero; weights around one and around zero."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = 1.0
    if len(shape) > 1:
        magnitudes = torch.tensor((1.0, 1e-3, 16.0, 3e-4, 0.0, 1.0)).repeat(-(-shape[-2] // 6))[: shape[-2], None]
    tensors = {"x": (scale * magnitudes * torch.randn(shape, generator=generator)).to(x)}
    if weight is not None:
        tensors["weight"] = (0.3 * torch.randn(shape[-1:], generator=generator) + torch.arange(shape[-1]) % 2).to(
            weight
        )
    if VARIANTS[variant].gate if gate is None else gate:
        tensors["gate"] = (3 * torch.randn(shape, generator=generator)).to(x)
    return tensors


def summands(x=SINGLE, residual=None, weight=None, shape=(2, 6, WIDTH)):
    """Two tensors to add, and the weight of the norm of their sum."""
    first, second = tensors(x=x, weight=weight or x, shape=shape), tensors(x=residual or x, shape=shape, scale=0.5)
    return {"x": first["x"], "residual": second["x"].flip(-1), "weight": first["weight"]}


def both(module, variant="llama", name="rms_norm", **options):
    """The function *name* of the backend's *module* and that of the reference, both called with tensors by name."""

    def called(function):
        return lambda **tensors: function(**tensors, variant=variant, **options)

    return called(getattr(module, name)), called(getattr(reference, name))


def viewed(view, *functions):
    """*functions*, called with views of x and gate, and with the part of the weight that fits."""

    def called(function):
        def run(x, weight, gate=None):
            x = view(x)
            gates = {} if gate is None else {"gate": view(gate)}
            return function(x=x, weight=weight[: x.shape[-1]], **gates)

        return run

    return [called(function) for function in functions]
