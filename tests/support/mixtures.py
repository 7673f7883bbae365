"""Arguments for every way to call a mixture of experts, and how the results of a call are judged."""

import torch
from torch import nn
from torch.nn import functional

from fuseplug_moe import reference

from . import backends

HALF = {torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 8e-3}


def arguments(tokens=7, experts=5, k=2, hidden=12, inner=6, dtype=torch.float32, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).mul(shape[-1] ** -0.5).to(dtype).requires_grad_()

    halves = 1 if options.get("layout") == "ungated" else 2
    named = {
        "x": torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_(),
        "top_k_index": torch.rand(tokens, experts, generator=generator).topk(k)[1],
        "top_k_weights": torch.rand(tokens, k, generator=generator).requires_grad_(),
        "gate_up": normal(experts, halves * inner, hidden),
        "down": normal(experts, hidden, inner),
    }
    if options.get("transposed"):
        named |= {name: named[name].detach().mT.contiguous().requires_grad_() for name in ("gate_up", "down")}
    if padded := options.pop("padded", 0):
        for name in ("x", "top_k_weights"):
            named[name].detach()[-padded:] = 0
        named["top_k_index"][-padded:] = torch.arange(k)
    if options.pop("biased", False):
        named |= {"gate_up_bias": normal(experts, halves * inner), "down_bias": normal(experts, hidden)}
    if options.pop("listed", False):
        gate, up = named.pop("gate_up").detach().chunk(2, dim=2 if options.get("transposed") else 1)
        named |= {"gate_up": leaves(gate), "up": leaves(up), "down": leaves(named["down"])}
    return named | options


TINY = {"tokens": 3, "experts": 3} if backends.NAME == "triton" else {}
"""Arguments that give a mixture few tiles, because Triton's interpreter takes a second for each tile."""


def leaves(stacked):
    return [matrix.detach().clone().requires_grad_() for matrix in stacked]


def run(function, named, upstream=None):
    """The result and every gradient, in order."""
    y = function(**named)
    tensors = [t for v in named.values() for t in (v if isinstance(v, list) else [v]) if isinstance(t, torch.Tensor)]
    wanted = [t for t in tensors if t.requires_grad]
    if upstream is None:
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y)
    return [y.detach(), *torch.autograd.grad(y, wanted, upstream, allow_unused=True)]


def assert_close(found, expected, share):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            limit = share * max(other.abs().max().item() if other.numel() else 0.0, 1e-3)
            torch.testing.assert_close(one, other, rtol=0, atol=limit)


PADDED = "padded, most experts idle"
WAYS = {
    "stacked": {},
    "one expert": {"experts": 1, "k": 1},
    "one token": {"tokens": 1},
    "no token": {"tokens": 0},
    "all experts": {"experts": 3, "k": 3},
    "many experts": {"tokens": 40, "experts": 24, "k": 3, "hidden": 16, "inner": 8},
    PADDED: {"padded": 5, "experts": 24},
    "odd": {"hidden": 7, "inner": 3},
    "large": {"tokens": 3000, "hidden": 128, "inner": 96},
    "transposed": {"transposed": True},
    "transposed, many": {"transposed": True, "tokens": 40, "experts": 24, "k": 3, "hidden": 16, "inner": 8},
    "as in gpt-oss": {
        "transposed": True,
        "biased": True,
        "layout": "interleaved",
        "activation": "swish-clamp-before-offset",
        "limit": 0.5,
    },
    "ungated": {"layout": "ungated", "activation": "relu2"},
    "listed": {"listed": True},
    "listed, idle without gradient": {"listed": True, "idle": "none", "experts": 9, "tokens": 3},
    "gate called": {"activation": lambda rows: torch.tanh(rows[:, ::2]) * rows[:, 1::2]},
    "post": {"post": lambda rows: functional.rms_norm(rows, rows.shape[-1:], None, 0.1)},
}
GATES = {
    f"{name}, {layout}": {"activation": name, "layout": layout, "limit": 0.5, "alpha": 1.3}
    for name in reference.GATES
    for layout in ("concatenated", "interleaved", "ungated")
}
LISTED = {
    "listed, one": {"listed": True, "experts": 1, "k": 1},
    "listed, transposed": {"listed": True, "transposed": True},
    "listed, relu": {"listed": True, "activation": "relu"},
    "listed, own": {"listed": True, "activation": lambda rows: rows[:, :6].sigmoid() * rows[:, 6:]},
}
EVERY_WAY = WAYS | GATES | LISTED
if backends.NAME == "triton":
    from fuseplug_backends.triton import FORMULAS

    def _is_served(way):
        gate = reference.GATES.get(way.get("activation"))
        return gate is None or gate.row.formula in FORMULAS

    EVERY_WAY = {name: way for name, way in EVERY_WAY.items() if name != "large" and _is_served(way)}
    EVERY_WAY |= {name: EVERY_WAY[name] | {"tokens": 9} for name in ("many experts", "transposed, many")}
FEW = {name: EVERY_WAY[name] for name in ("stacked", "as in gpt-oss", "listed", "post", "gate called", PADDED)}


def on(device, value):
    """A deep copy of *value* on *device*; the copy of a tensor that requires a gradient is a leaf that does."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: on(device, each) for name, each in value.items()}
    return [on(device, each) for each in value] if isinstance(value, list) else value


def wide(value):
    """*value* in float64."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: wide(each) for name, each in value.items()}
    return [wide(each) for each in value] if isinstance(value, list) else value


def on_device(function, named, device):
    """The result and every gradient of *function* for *named* on *device*, brought back to the CPU."""
    upstream = torch.randn(named["x"].shape, generator=torch.Generator().manual_seed(9)).to(named["x"].dtype)
    return [None if t is None else t.cpu() for t in run(function, on(device, named), upstream.to(device))]


def assert_right(found, named, dtype):
    """Assert that *found* is within twice the error of the reference on the CPU, or within the roundings of *dtype*.

    Twice the error, because a clamp's derivative has a jump, and each may round a number to another side of it.
    """
    true, own = (run(reference.moe, each) for each in (wide(named), named))
    for one, other, expected in zip(found, true, own, strict=True):
        assert (one is None) == (expected is None)
        if one is None or not one.numel():
            continue
        assert (one.shape, one.dtype) == (expected.shape, expected.dtype)
        error, allowed = ((each.double() - other.double()).abs().max() for each in (one, expected))
        assert error <= max(2 * allowed, HALF[dtype] * max(other.abs().max(), 1e-3))


class Scaled(nn.Module):
    """A function of rows with a parameter whose gradient depends on all rows."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, width))

    def forward(self, rows):
        return rows[:, : len(self.weight)] * self.weight
