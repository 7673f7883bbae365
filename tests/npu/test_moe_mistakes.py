"""Mistakes that are easily made with the operations of torch_npu, each of which shows in one of a few calls."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import EVERY_WAY, Scaled, arguments, assert_right, on, on_device
from torch import Tensor

from fuseplug_host_npu import ContractError
from fuseplug_moe import reference
from fuseplug_moe.backends.counts_on_host import HostCounts
from fuseplug_moe.backends.npu import gmm, mixture, moe, routing


def planted(owner, name, change=None, /, **arguments):
    """A function that has the one called *name* call *change* with itself, or changes some of its arguments."""

    def plant(monkeypatch):
        function = getattr(owner, name)

        def changed(*args, **kwargs):
            if change is not None:
                return change(function, *args, **kwargs)
            return function(*args, **kwargs | {key: how(kwargs[key]) for key, how in arguments.items()})

        monkeypatch.setattr(owner, name, changed)

    return plant


PLANTED = {
    "sizes read as ends": planted(torch.ops.npu, "npu_grouped_matmul", group_list_type=lambda _: 0),
    "sizes in int32": planted(torch.ops.npu, "npu_grouped_matmul", group_list=Tensor.int),
    "an output for each group": planted(torch.ops.npu, "npu_grouped_matmul", split_item=lambda _: 0),
    "bias forgotten": planted(torch.ops.npu, "npu_grouped_matmul", bias=lambda _: None),
    "never summed over groups": planted(torch.ops.npu, "npu_grouped_matmul", group_type=lambda _: 0),
    "one weight for all": planted(gmm, "_gmm", lambda f, x, w, *a, **k: f(x, [w[0][:1].expand_as(w[0])], *a, **k)),
    "x laid out anew": planted(gmm, "_gmm", lambda f, x, *a, **k: f(x.contiguous(), *a, **k)),
    "no derivative": planted(mixture.GmmFunction, "apply", lambda f, x, w, c, b: gmm._gmm(x, [w], c, b)),
    "weight gradient transposed": planted(
        gmm, "_weight_gradient", lambda f, x, grad, counts, transposed: f(x, grad, counts, transposed=False).mT
    ),
    "bias gradient of all rows": planted(gmm, "_bias_gradient", lambda f, g, counts: g.sum(0).expand(len(counts), -1)),
    "order for places": planted(
        torch.ops.npu, "npu_moe_token_permute", lambda f, *a: (f(*a)[0], f(*a)[1].argsort().int())
    ),
    "rows of experts elsewhere go back": planted(
        routing._Dispatch, "apply", lambda f, x, index, _: torch.ops.npu.npu_moe_token_permute(x, index)
    ),
    "experts elsewhere have rows": planted(
        routing._Dispatch, "apply", lambda f, x, index, elsewhere: f(x, index, torch.zeros_like(elsewhere))
    ),
    "experts elsewhere counted": planted(torch, "histc", lambda f, x, *a, **k: f(x.clamp(max=4), *a, **k)),
    "memory as it was": planted(routing.Route, "fill", lambda f, self, tensor: tensor),
    "not weighed": planted(torch.ops.npu, "npu_moe_token_unpermute", lambda f, rows, places, _: f(rows, places)),
    "weights detached": planted(torch.ops.npu, "npu_moe_token_unpermute", lambda f, r, p, w: f(r, p, w.detach())),
    "the other half activated": planted(torch.ops.npu, "npu_geglu", activate_left=lambda _: False),
    "the other approximation": planted(torch.ops.npu, "npu_geglu", approximate=lambda other: 1 - other),
    "a limit of its own": planted(torch.ops.npu, "npu_clipped_swiglu", limit=lambda _: 7.0),
    "no one added": planted(torch.ops.npu, "npu_clipped_swiglu", bias=lambda _: 0.0),
    "halves for turns": planted(torch.ops.npu, "npu_clipped_swiglu", interleaved=lambda _: False),
    "silu before its time": planted(
        mixture, "apply_gate", lambda f, g, u, *a: f(*((g, u) if u is None else (u, g)), *a)
    ),
    "zeros for idle experts": planted(HostCounts, "positive", lambda f, *routing: [True for _ in f(*routing)]),
}


class TestMistakes:
    """Each that is easily made shows in one of a few calls."""

    @staticmethod
    def assert_all_right():
        for way in ("as in gpt-oss", "listed, idle without gradient", "gelu, concatenated", "gate called"):
            named = arguments(**EVERY_WAY[way])
            if way != "listed, idle without gradient":
                named["top_k_index"].view(-1)[[0, 3, 8]] = 5
            assert_right(on_device(moe, named, "npu"), named, torch.float32)
        named = arguments()
        named["top_k_index"].view(-1)[:5] = 9
        post = Scaled(12)
        (expected,) = torch.autograd.grad(reference.moe(**named, post=post).sum(), post.weight)
        (gradient,) = torch.autograd.grad(moe(**on("npu", named), post=post.to("npu")).sum(), post.weight)
        torch.testing.assert_close(gradient.cpu(), expected)

    def test_none_is_made(self, host_npu):
        self.assert_all_right()

    @pytest.mark.parametrize("mistake", PLANTED)
    def test_shows(self, host_npu, monkeypatch, mistake):
        PLANTED[mistake](monkeypatch)
        with pytest.raises((AssertionError, ContractError, RuntimeError, ValueError)):
            self.assert_all_right()
