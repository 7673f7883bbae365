"""Mixtures of experts on the NPU beside the reference on the CPU."""

from __future__ import annotations

import torch
from support.mixtures import Scaled, arguments, on, run

from fuseplug_moe import reference
from fuseplug_moe.backends.npu import moe


def on_npu(named, function=moe):
    """What *function* gives for *named* on the NPU: the result and every gradient, brought back."""
    generator = torch.Generator().manual_seed(9)
    upstream = torch.randn(named["x"].shape, generator=generator).to(named["x"].dtype).to("npu")
    return [None if each is None else each.cpu() for each in run(function, on("npu", named), upstream)]


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
