"""Arguments for a mixture of experts in every way it may be asked for, and what comes of a call."""

from __future__ import annotations

import torch
from torch.nn import functional

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
    if options.pop("biased", False):
        named |= {"gate_up_bias": normal(experts, halves * inner), "down_bias": normal(experts, hidden)}
    if options.pop("listed", False):
        gate, up = named.pop("gate_up").detach().chunk(2, dim=2 if options.get("transposed") else 1)
        named |= {"gate_up": leaves(gate), "up": leaves(up), "down": leaves(named["down"])}
    return named | options


def leaves(stacked):
    return [matrix.detach().clone().requires_grad_() for matrix in stacked]


def run(function, named, upstream=None):
    """The result and every gradient, in order."""
    y = function(**named)
    tensors = [t for v in named.values() for t in (v if isinstance(v, list) else [v]) if isinstance(t, torch.Tensor)]
    wanted = [t for t in tensors if t.requires_grad]
    if upstream is None:
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, wanted, upstream, allow_unused=True)]


def assert_close(found, expected, share):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            limit = share * max(other.abs().max().item() if other.numel() else 0.0, 1e-3)
            torch.testing.assert_close(one, other, rtol=0, atol=limit)


WAYS = {
    "stacked": {},
    "one expert": {"experts": 1, "k": 1},
    "one token": {"tokens": 1},
    "no token": {"tokens": 0},
    "all experts": {"experts": 3, "k": 3},
    "many experts": {"tokens": 40, "experts": 24, "k": 3, "hidden": 16, "inner": 8},
    "odd": {"hidden": 7, "inner": 3},
    "large": {"tokens": 3000, "hidden": 128, "inner": 96},
    "transposed": {"transposed": True},
    "transposed, many": {"transposed": True, "tokens": 40, "experts": 24, "k": 3, "hidden": 16, "inner": 8},
    "as in gpt-oss": {
        "transposed": True,
        "biased": True,
        "layout": "interleaved",
        "activation": "sigmoid-linear",
        "limit": 0.5,
    },
    "ungated": {"layout": "ungated", "activation": "relu2"},
    "listed": {"listed": True},
    "listed, idle without gradient": {"listed": True, "idle": "none", "experts": 9, "tokens": 3},
    "gate called": {"activation": lambda rows: torch.tanh(rows[:, ::2]) * rows[:, 1::2]},
    "post": {"post": lambda rows: functional.rms_norm(rows, rows.shape[-1:], None, 0.1)},
}
