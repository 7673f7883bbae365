"""Mixtures of experts on the NPU beside the reference on the CPU."""

from __future__ import annotations

import torch
from support.mixtures import HALF, WAYS, arguments, run
from torch import nn

from fuseplug_moe import reference
from fuseplug_moe.npu import moe

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
FEW = {name: EVERY_WAY[name] for name in ("stacked", "as in gpt-oss", "listed", "post", "gate called")}


def on(device, value):
    """A copy of *value*, all below it included, on *device*; one that wants a gradient is a leaf that does."""
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


def on_npu(named, function=moe):
    """What *function* gives for *named* on the NPU: the result and every gradient, brought back."""
    generator = torch.Generator().manual_seed(9)
    upstream = torch.randn(named["x"].shape, generator=generator).to(named["x"].dtype).to("npu")
    return [None if each is None else each.cpu() for each in run(function, on("npu", named), upstream)]


def assert_right(found, named, dtype):
    """It is as near to the truth as the reference on the CPU is, or within the roundings of *dtype*.

    A clamp has a jump in its derivative, and on which side of it a number is, either may round differently.
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
    """A function of rows with a parameter, whose gradient looks at all of them."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, width))

    def forward(self, rows):
        return rows[:, : len(self.weight)] * self.weight


def assert_parameters_right(where):
    """So is the gradient of a parameter of the function of rows that is given as *where*, some experts elsewhere."""
    named = arguments()
    named["top_k_index"].view(-1)[:5] = 9
    function = Scaled(12 if where == "post" else 6)
    (expected,) = torch.autograd.grad(reference.moe(**named, **{where: function}).sum(), function.weight)
    function.to("npu")
    (found,) = torch.autograd.grad(moe(**on("npu", named), **{where: function}).sum(), function.weight)
    torch.testing.assert_close(found.cpu(), expected)


FUSED = {"npu_moe_token_permute", "npu_grouped_matmul", "npu_moe_token_unpermute"}


def npu_ops(calls):
    """Those of torch_npu among *calls*, by the names they are called by: autograd puts an underscore before some."""
    named = {name.removeprefix("_") for name in calls}
    return {name for name in named if name.startswith(("npu_moe", "npu_grouped", "npu_swi", "npu_geg", "npu_clip"))}
