"""What is specific to RMSNorm on NPUs: how many kernels it launches, and the limits of torch_npu's operations."""

from collections import Counter

import pytest
import torch
from support.norms import BF16, SINGLE, WIDTH, summands, tensors

from fuseplug_rmsnorm import reference
from fuseplug_rmsnorm.backends import npu
from fuseplug_rmsnorm.kernels import NpuRMSNormKernel


@pytest.mark.parametrize(
    ("launches", "variant", "options", "changes"),
    [
        (1, "llama", {}, {}),
        (1, "no-upcast-weight-first", {}, {}),
        (1, "t5", {}, {}),
        (1, "cast-last", {}, {"weight": SINGLE}),
        (2, "llama", {}, {"weight": None}),
        (2, "llama", {}, {"weight": SINGLE}),
        (2, "gemma-own-offset", {}, {}),
        (2, "gemma", {}, {"x": SINGLE, "weight": SINGLE}),
        (3, "gemma", {}, {}),
        (4, "gemma-input-scaled", {}, {}),
        (1, "gate-first", {"group_size": WIDTH}, {"gate": False}),
        (3, "gate-first", {"group_size": 16}, {"gate": False}),
        (3, "gate-first", {}, {}),
        (3, "gated-silu", {}, {}),
        (3, "gated-sigmoid-cast-last", {}, {}),
    ],
)
def test_so_many_kernels_are_launched(host_npu, launches, variant, options, changes):
    arguments = {name: t.to("npu") for name, t in tensors(variant, **{"x": BF16, "weight": BF16, **changes}).items()}
    host_npu.calls.clear()
    npu.rms_norm(**arguments, variant=variant, **options)
    assert sum(host_npu.calls.values()) == launches, host_npu.calls


def test_the_backward_is_one_operation_and_the_host_waits_for_nothing(host_npu):
    arguments = {name: t.to("npu").requires_grad_() for name, t in tensors().items()}
    host_npu.calls.clear()
    npu.rms_norm(**arguments).backward(torch.ones_like(arguments["x"]))
    assert host_npu.calls["npu_rms_norm"] == host_npu.calls["npu_rms_norm_backward"] == 1
    assert not host_npu.calls["aten::_local_scalar_dense"]


@pytest.mark.parametrize("view", [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[..., :17]])
def test_views_are_not_copied(host_npu, view):
    x, weight = (t.to("npu") for t in tensors(x=BF16, weight=BF16).values())
    x = view(x)
    host_npu.calls.clear()
    npu.rms_norm(x, weight[: x.shape[-1]])
    assert host_npu.calls == Counter(npu_rms_norm=1)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"shape": (WIDTH,)}, {}),
        ({"shape": (1,) * 8 + (WIDTH,)}, {}),
        ({"shape": (1,) * 7 + (WIDTH,)}, {"group_size": 16}),
        ({"x": torch.float64, "weight": torch.float64}, {}),
        ({"x": SINGLE, "weight": torch.float64}, {}),
        ({"shape": (3, 0, WIDTH)}, {}),
    ],
    ids=str,
)
def test_what_is_beyond_the_limits_is_the_reference(host_npu, changes, options):
    arguments = {name: t.to("npu") for name, t in tensors(**changes).items()}
    assert torch.equal(npu.rms_norm(**arguments, **options), reference.rms_norm(**arguments, **options))
    assert not host_npu.calls["npu_rms_norm"]


def test_a_sum_is_normalised_in_one_launch(host_npu):
    arguments = {name: t.to("npu") for name, t in summands(BF16).items()}
    host_npu.calls.clear()
    npu.add_rms_norm(**arguments)
    assert host_npu.calls == Counter(npu_add_rms_norm=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": BF16},
        {"x": BF16, "residual": SINGLE},
        {"x": torch.float64},
        {"shape": (0, WIDTH)},
        {"shape": (1,) * 8 + (WIDTH,)},
    ],
    ids=str,
)
def test_sums_beyond_the_limits_are_added_and_normalised(host_npu, changes):
    npu.add_rms_norm(**{name: t.to("npu") for name, t in summands(**changes).items()})
    assert not host_npu.calls["npu_add_rms_norm"]


def test_without_the_operation_it_is_not_available(host_npu, monkeypatch):
    kernel = NpuRMSNormKernel()
    assert kernel.unavailable("npu") is None
    monkeypatch.setattr(NpuRMSNormKernel, "ops", ("npu_rms_norm", "npu_of_tomorrow"))
    assert "has no npu_of_tomorrow" in kernel.unavailable("npu")
