"""An activation is one row of one table: with the row, every backend computes it, or declines it by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fuseplug import KernelManager
from fuseplug_backends.activations import ACTIVATIONS, Activation
from fuseplug_moe import reference as moe
from fuseplug_moe.backends.inductor import moe as fused_moe
from fuseplug_moe.specimens.stacked_experts import StackedExperts
from fuseplug_swiglu import reference as swiglu
from fuseplug_swiglu.backends import inductor, npu
from fuseplug_swiglu.specimens.mlps import HIDDEN, Separate


class Mish(nn.Module):
    """Not `nn.Mish` itself, because the other backends would say more about that."""

    def forward(self, x):
        return functional.mish(x)


@pytest.fixture
def mish(monkeypatch):
    row = Activation(lambda x, _: functional.mish(x), "mish", frozenset({"mish"}), native=True)
    monkeypatch.setitem(ACTIVATIONS, "mish", row)
    monkeypatch.setitem(moe.GATES, "mish", moe.Gate("mish"))


def answer(module, device, kernel):
    """The answer of *kernel* about *module* itself: the variant, or the reason of a rejection."""
    manager = KernelManager(environ={"FUSEPLUG_KERNELS": kernel})
    report = manager.plan(module, device=device, verify=False).report
    (entry,) = [entry for entry in report.entries if "" in entry.paths]
    return entry.variant if entry.kernel_id == kernel else dict(entry.rejections)[kernel].reason


def test_the_model_is_recognised_and_inductor_computes_it(mish, small_checks):
    module, x = Separate(Mish()), torch.randn(2, 5, HIDDEN)
    expected = module(x)
    with KernelManager(environ={"FUSEPLUG_KERNELS": "inductor_fused_swiglu"}).apply_all(module) as applied:
        assert [entry.variant for entry in applied.report.fused] == ["mish"]
        torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(("device", "kernel"), [("npu", "npu_fused_swiglu"), ("cuda", "triton_fused_swiglu")])
def test_the_others_decline_it_by_name(mish, device, kernel):
    assert "mish" in answer(Separate(Mish()), device, kernel)


def test_without_the_row_nobody_knows_it():
    assert "none of" in answer(Separate(Mish()), "cuda", "triton_fused_swiglu")


def test_a_function_that_lacks_it_is_the_reference(mish):
    gate, up = torch.randn(2, 3, 8)
    expected = swiglu.swiglu(gate, up, activation="mish")
    for function in (npu.swiglu, inductor.swiglu):
        assert torch.equal(function(gate, up, activation="mish"), expected)


@pytest.mark.parametrize(
    ("device", "kernel", "said"),
    [
        ("cpu", "inductor_fused_moe", "mish"),
        ("npu", "npu_fused_moe", "mish"),
        ("cuda", "triton_fused_moe", "it computes mish: the Triton program has no mish"),
    ],
)
def test_a_gate_of_experts_is_a_row_too(mish, device, kernel, said):
    module = StackedExperts(4, 24, 16, Mish())
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.2)
    assert answer(module, device, kernel).startswith(said)


def test_experts_compute_it(mish):
    x, index, weights = torch.randn(6, 8), torch.randint(3, (6, 2)), torch.rand(6, 2)
    projections = torch.randn(3, 8, 8) / 3, torch.randn(3, 8, 4) / 2
    expected = moe.moe(x, index, weights, *projections, activation="mish")
    torch.testing.assert_close(fused_moe(x, index, weights, *projections, activation="mish"), expected)
