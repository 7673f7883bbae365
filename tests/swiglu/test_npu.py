"""What is specific to gated MLPs on NPUs: which operations are launched, and which activations have none."""

import itertools
import math
from collections import Counter

import pytest
import torch
from support.gates import BF16, DOUBLE, EVERY_LAYOUT, INNER, SINGLE, TOLERANCE, both, options, tensors
from torch import nn

from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.npu import here
from fuseplug_host_npu import HostNPU
from fuseplug_swiglu.backends import npu
from fuseplug_swiglu.kernels import NpuSwiGluKernel
from fuseplug_swiglu.reference import VARIANTS
from fuseplug_swiglu.specimens.activations import ReLU2
from fuseplug_swiglu.specimens.mlps import Offset, Separate

GELUS = ("gelu", "gelu_tanh", "gelu_new", "gelu_fast", "gelu_erf")
OPERATIONS = ("npu_swiglu", "npu_geglu", "npu_clipped_swiglu")


def test_every_combination_is_served_or_said_not_to_be():
    served = {
        *itertools.product(("silu", "swish", *GELUS), ("plain", "wide", "scaled", "sparse")),
        *itertools.product(("silu", "swish", "quick_gelu"), ("clamp-before", "clamp-before-offset")),
    }
    assert {pair for pair in itertools.product(ACTIVATIONS, VARIANTS) if npu.unsupported(*pair) is None} == served


@pytest.mark.parametrize(
    ("activation", "variant", "why"),
    [
        ("relu", "plain", "torch_npu has no operation that gates with relu"),
        ("silu", "clamp-after", "torch_npu has no operation that gates with silu, clamped after it"),
        ("gelu", "clamp-before", "torch_npu has no operation that gates with gelu, clamped before it"),
    ],
)
def test_what_has_no_operation_is_said_to_have_none(activation, variant, why):
    assert npu.unsupported(activation, variant) == why


@pytest.mark.parametrize(
    ("expected", "activation", "variant", "layout"),
    [
        (["npu_swiglu"], "silu", "plain", "gate-first"),
        (["aten::cat", "npu_swiglu"], "silu", "plain", None),
        (["aten::roll", "npu_swiglu"], "silu", "plain", "gate-second"),
        (["aten::clone", "npu_swiglu"], "silu", "plain", "interleaved"),
        (["npu_swiglu"], "silu", "wide", "gate-first"),
        (["aten::mul", "aten::cat", "npu_swiglu"], "silu", "scaled", "gate-first"),
        (["npu_geglu"], "gelu_tanh", "plain", "gate-first"),
        (["npu_geglu"], "gelu", "plain", "gate-second"),
        (["npu_clipped_swiglu"], "swish", "clamp-before-offset", "interleaved"),
        (["npu_clipped_swiglu"], "swish", "clamp-before-offset", "gate-first"),
        (["aten::roll", "npu_clipped_swiglu"], "swish", "clamp-before-offset", "gate-second"),
    ],
)
def test_these_kernels_are_launched(backend, expected, activation, variant, layout):
    arguments = backend.on(tensors(layout, BF16))
    backend.clear()
    npu.swiglu(**arguments, **options(activation, variant, layout))
    assert backend.host.calls == Counter(expected)


def test_the_gradient_of_both_in_one_is_one_launch(backend):
    gate_up = backend.on(tensors("gate-first", BF16), "gate")["gate"]
    y = npu.swiglu(gate_up)
    upstream = torch.ones_like(y)
    backend.clear()
    torch.autograd.grad(y, gate_up, upstream)
    assert backend.host.calls == Counter(npu_swiglu_backward=1)


@pytest.mark.parametrize("steepness", [0.5, 1.702])
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_a_clamped_swish_has_any_steepness(backend, layout, steepness):
    functions = both(npu, **options("swish", "clamp-before-offset", layout, beta=steepness, limit=7.0))
    backend.assert_right(*functions, tensors(layout, BF16), TOLERANCE["npu"])
    assert backend.launches["npu_clipped_swiglu"] == 1


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"shape": (0, INNER)}, {}),
        ({"shape": (3, 0, INNER)}, {"activation": "gelu"}),
        ({"shape": (1,) * 8 + (INNER,)}, {}),
        ({"dtype": DOUBLE}, {"activation": "gelu"}),
        ({"dtype": SINGLE, "up": DOUBLE}, {}),
        ({"shape": (INNER,)}, {"variant": "clamp-before"}),
        ({}, {"variant": "clamp-before", "limit": math.inf}),
        ({}, {"variant": "clamp-before", "limit": 0.0}),
        ({}, {"variant": "clamp-before", "limit": -1.0}),
        ({}, {"variant": "clamp-after"}),
        ({}, {"activation": "relu"}),
        ({}, {"activation": "swish", "beta": 1.5}),
    ],
    ids=str,
)
def test_what_no_operation_takes_is_the_reference(backend, changes, how):
    backend.assert_right(*both(npu, **options(**how)), tensors(**changes), TOLERANCE["npu"])
    assert not any(backend.launches[name] for name in OPERATIONS)


def test_where_a_gradient_is_a_formula_it_has_a_second_one(backend):
    ours, theirs = both(npu, **options("swish", "clamp-before-offset", "interleaved", limit=7.0))
    second = []
    for function, device in ((ours, "npu"), (theirs, "cpu")):
        gate_up = tensors("interleaved")["gate"].to(device).requires_grad_()
        (first,) = torch.autograd.grad(function(gate=gate_up).sum(), gate_up, create_graph=True)
        second += torch.autograd.grad(first.square().sum(), gate_up)
    torch.testing.assert_close(second[0].cpu(), second[1])


def test_a_fake_gradient_of_geglu_is_refused_by_torch_npu(fake_npu):
    """Fails once torch_npu's meta of npu_geglu_grad is right; then `_geglu` needs no formula inside torch.compile."""
    gate_up = tensors("gate-first")["gate"].to("npu").requires_grad_()
    with pytest.raises((RuntimeError, TypeError)):
        npu.swiglu(gate_up, activation="gelu").sum().backward()


def test_what_has_no_operation_is_left_alone_and_the_report_says_why(backend, small_checks):
    model = nn.Sequential(Separate(ReLU2()), Separate(nn.SiLU())).to("npu")
    report = backend.manager("swiglu").apply_all(model).report
    (entry,) = report.left_alone
    assert entry.paths == ("0",)
    assert "it computes relu2: torch_npu has no operation that gates with relu2" in entry.why_not
    assert [entry.paths for entry in report.fused] == [("1",)]


LACKING = "this torch_npu, or its CANN, has no npu_clipped_swiglu"


def test_a_torch_npu_without_the_clipped_operation_lacks_only_that(host_npu, monkeypatch):
    class Older:
        npu_swiglu = torch.ops.npu.npu_swiglu
        npu_geglu = torch.ops.npu.npu_geglu

    monkeypatch.setattr(torch.ops, "npu", Older)
    assert NpuSwiGluKernel().unavailable("npu") is None
    assert npu.unsupported("swish", "clamp-before-offset") == LACKING
    assert npu.unsupported("silu", "plain") is None


def test_a_cann_without_the_clipped_operation_lacks_only_that(backend, small_checks, monkeypatch):
    """torch_npu has the operation, but its first call raises."""
    monkeypatch.delitem(here._KNOWN, "npu_clipped_swiglu")
    with HostNPU(lacking={"npu_clipped_swiglu"}) as old:
        functions = both(npu, **options("swish", "clamp-before-offset", "interleaved", limit=7.0))
        backend.assert_right(*functions, tensors("interleaved"), TOLERANCE["npu"])
        assert npu.unsupported("silu", "plain") is None
        model = nn.Sequential(Offset(), Separate(nn.SiLU())).to("npu")
        report = backend.manager("swiglu").apply_all(model).report
    assert LACKING in report.left_alone[0].why_not
    assert [entry.paths for entry in report.fused] == [("1",)]
    assert old.calls["npu_swiglu"]
