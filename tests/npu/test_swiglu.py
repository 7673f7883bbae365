"""Gated MLPs on an NPU in host memory: right in every variant, within the limits, and really by the operations."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from support.judging import assert_right, outcome
from support.thorough import covering
from torch import nn

from fuseplug import KernelManager
from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.npu import here
from fuseplug_host_npu import HostNPU
from fuseplug_swiglu import reference
from fuseplug_swiglu.backends import npu
from fuseplug_swiglu.kernels import NpuSwiGluKernel
from fuseplug_swiglu.reference import LAYOUTS, VARIANTS
from fuseplug_swiglu.specimens.activations import GELUErf, ReLU2
from fuseplug_swiglu.specimens.mlps import InOne, Offset, Separate, Sparse
from fuseplug_verify import Tolerance

INNER = 20
TOLERANCE = Tolerance(roundings=6.0, working_roundings=24.0)
HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BF16, SINGLE)
NUMBERS = {"scaled": {"scale": 0.5}, "sparse": {"sparsity": 0.6}}
NUMBERS |= {name: {"limit": 1.0} for name, how in VARIANTS.items() if how.clamp}
GELUS = ("gelu", "gelu_tanh", "gelu_new", "gelu_fast", "gelu_erf")
SERVED = [
    *itertools.product(("silu", "swish", *GELUS), ("plain", "wide", "scaled", "sparse")),
    *itertools.product(("silu", "swish", "quick_gelu"), ("clamp-before", "clamp-before-offset")),
]
"""Every activation and variant that an operation computes."""


def tensors(layout=None, dtype=SINGLE, up=None, shape=(2, 5, INNER)):
    """Gate and up, or both in one; from small to where a limit is met, and a row of zeros."""
    generator = torch.Generator().manual_seed(0)
    shape = shape if layout is None else (*shape[:-1], 2 * shape[-1])
    magnitudes = torch.tensor((1.0, 8.0, 0.25, 0.0, 3.0))[: shape[-2], None] if len(shape) > 1 else 1.0
    names = ("gate", "up") if layout is None else ("gate",)
    dtypes = (dtype, up or dtype)
    made = {name: magnitudes * torch.randn(shape, generator=generator) for name in names}
    return {name: t.to(which) for (name, t), which in zip(made.items(), dtypes, strict=False)}


def both(activation="silu", variant="plain", layout=None, **options):
    options = {"activation": activation, "variant": variant, **NUMBERS.get(variant, {}), **options}
    options |= {} if layout is None else {"layout": layout}

    def called(function):
        return lambda **tensors: function(**tensors, **options)

    return called(npu.swiglu), called(reference.swiglu)


def operation(activation, variant):
    if VARIANTS[variant].clamp:
        return "npu_clipped_swiglu"
    return "npu_geglu" if activation in GELUS else "npu_swiglu"


BACKWARD = {"npu_swiglu": "npu_swiglu_backward", "npu_geglu": "npu_geglu_grad", "npu_clipped_swiglu": None}


@pytest.mark.parametrize(
    ("activation", "variant", "layout", "dtype"),
    covering(
        ((*pair, layout, dtype) for pair, layout, dtype in itertools.product(SERVED, [None, *LAYOUTS], DTYPES)),
        by=lambda activation, variant, layout, dtype: [(activation, variant), layout, dtype],
    ),
    ids=str,
)
def test_every_activation_variant_and_layout_in_every_dtype(host_npu, activation, variant, layout, dtype):
    assert npu.unsupported(activation, variant) is None
    assert_right(*both(activation, variant, layout), tensors(layout, dtype), TOLERANCE)
    ran = {name: count for name, count in host_npu.calls.items() if name.startswith("npu_") and "lu" in name}
    name = operation(activation, variant)
    assert ran == {each: 1 for each in (name, BACKWARD[name]) if each}


@pytest.mark.parametrize("dtypes", [(BF16, SINGLE), (SINGLE, BF16), (HALF, BF16)], ids=str)
@pytest.mark.parametrize("variant", ["plain", "wide"])
def test_gate_and_up_of_two_dtypes(host_npu, variant, dtypes):
    assert_right(*both("silu", variant), tensors(None, *dtypes), TOLERANCE)
    assert host_npu.calls["npu_swiglu"] == 1


@pytest.mark.parametrize("steepness", [0.5, 1.702])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_a_clamped_swish_has_any_steepness(host_npu, layout, steepness):
    ours, theirs = both("swish", "clamp-before-offset", layout, beta=steepness, limit=7.0)
    assert_right(ours, theirs, tensors(layout, BF16), TOLERANCE)
    assert host_npu.calls["npu_clipped_swiglu"] == 1


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
def test_these_kernels_are_launched(host_npu, expected, activation, variant, layout):
    given = {name: t.to("npu") for name, t in tensors(layout, BF16).items()}
    ours, _ = both(activation, variant, layout)
    host_npu.calls.clear()
    ours(**given)
    assert host_npu.calls == Counter(expected)


def test_the_gradient_of_both_in_one_is_one_launch(host_npu):
    gate_up = tensors("gate-first", BF16)["gate"].to("npu").requires_grad_()
    y = npu.swiglu(gate_up)
    upstream = torch.ones_like(y)
    host_npu.calls.clear()
    torch.autograd.grad(y, gate_up, upstream)
    assert host_npu.calls == Counter(npu_swiglu_backward=1)


@pytest.mark.parametrize("kept", [(None, "silu", 2), ("gate-first", "silu", 2), ("gate-first", "gelu", 3)])
def test_kept_for_the_backward_is_little_more_than_gate_and_up(host_npu, kept):
    layout, activation, passes = kept
    given = {name: t.to("npu").requires_grad_() for name, t in tensors(layout, BF16).items()}
    saved = {}

    def pack(tensor):
        saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = both(activation, "plain", layout)[0](**given)
    assert sum(saved.values()) == passes * y.numel()


@pytest.mark.parametrize("shape", [(1, INNER), (1, 1), (4, 1), (3, 13), (1,) * 7 + (INNER,)], ids=str)
@pytest.mark.parametrize(("activation", "variant"), [("silu", "plain"), ("gelu", "plain"), ("swish", "clamp-before")])
@pytest.mark.parametrize("layout", [None, "gate-first", "interleaved"])
def test_every_number_of_tokens_and_width(host_npu, layout, activation, variant, shape):
    assert_right(*both(activation, variant, layout), tensors(layout, shape=shape), TOLERANCE)
    assert host_npu.calls[operation(activation, variant)] == 1


@pytest.mark.parametrize("view", [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[..., 4:]])
@pytest.mark.parametrize(("activation", "variant"), [("silu", "plain"), ("gelu", "plain"), ("swish", "clamp-before")])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_inputs_need_not_be_contiguous(host_npu, layout, activation, variant, view):
    ours, theirs = both(activation, variant, layout)
    seen = [
        lambda function=function, **given: function(**{name: view(t) for name, t in given.items()})
        for function in (ours, theirs)
    ]
    assert_right(*seen, tensors(layout, BF16), TOLERANCE)
    assert host_npu.calls[operation(activation, variant)] == 1


@pytest.mark.parametrize(
    ("made", "options"),
    [
        ({"shape": (0, INNER)}, {}),
        ({"shape": (3, 0, INNER)}, {"activation": "gelu"}),
        ({"shape": (1,) * 8 + (INNER,)}, {}),
        ({"dtype": torch.float64}, {}),
        ({"dtype": torch.float64}, {"activation": "gelu"}),
        ({"dtype": SINGLE, "up": torch.float64}, {}),
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
def test_what_no_operation_takes_is_the_reference(host_npu, made, options):
    assert_right(*both(**options), tensors(**made), TOLERANCE)
    assert not any(host_npu.calls[name] for name in BACKWARD)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"variant": "round"}, "unknown variant"),
        ({"activation": "softmax"}, "unknown activation"),
        ({"layout": "gate-third"}, "unknown layout"),
        ({"up": torch.ones(1)}, "up must have the shape of gate"),
        ({"variant": "clamp-before"}, "needs a limit"),
        ({"scale": 2.0}, "takes no scale"),
    ],
)
def test_errors_are_those_of_the_reference(host_npu, arguments, why):
    with pytest.raises(ValueError, match=why):
        npu.swiglu(torch.ones(2, 2 * INNER, device="npu"), **arguments)


def test_autocast_makes_of_a_power_what_it_makes_of_the_references(host_npu):
    gate_up = tensors("gate-first", BF16)["gate"].to("npu")
    with torch.autocast("npu", BF16):
        for activation in ACTIVATIONS:
            ours, theirs = both(activation, layout="gate-first")
            assert ours(gate=gate_up).dtype is theirs(gate=gate_up).dtype


@pytest.mark.parametrize(
    ("activation", "variant", "layout"),
    covering(
        ((*pair, layout) for pair, layout in itertools.product(SERVED, [None, *LAYOUTS])),
        by=lambda activation, variant, layout: [(activation, variant), layout],
    ),
)
def test_fake_tensors_have_the_shapes_and_dtypes_of_the_reference(fake_npu, activation, variant, layout):
    ours, theirs = both(activation, variant, layout)
    for dtype in DTYPES:
        given = {name: t.to("npu").requires_grad_() for name, t in tensors(layout, dtype).items()}
        found = ours(**given)
        assert (found.shape, found.dtype, found.requires_grad) == ((*given["gate"].shape[:-1], INNER), dtype, True)
        if operation(activation, variant) == "npu_geglu":
            with pytest.raises((RuntimeError, TypeError)):  # torch_npu's meta of npu_geglu_grad; once it is right,
                found.sum().backward()  # so is this, and `_geglu` needs no formula inside torch.compile
        else:
            values = [outcome(function, given, "npu").values for function in (ours, theirs)]
            assert all(value is not None for value in values[0].values())
            shapes = [[(value.shape, value.dtype) for value in each.values()] for each in values]
            assert shapes[0] == shapes[1]


@pytest.mark.parametrize("layout", [None, "gate-first", "gate-second", "interleaved"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swish"])
def test_inside_torch_compile(host_npu, activation, layout):
    variant = "clamp-before-offset" if activation == "swish" else "plain"
    torch.compiler.reset()
    ours, theirs = both(activation, variant, layout)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_right(compiled, theirs, tensors(layout, BF16), TOLERANCE)
    assert host_npu.calls["npu_swiglu_backward"] == (
        activation == "silu"
    )  # the others are formulas, for their backward
    with torch.no_grad():
        host_npu.calls.clear()
        compiled(**{name: t.to("npu") for name, t in tensors(layout, BF16).items()})
    assert host_npu.calls[operation(activation, variant)] == 1


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_second_derivative_is_refused(host_npu, activation):
    gate_up = tensors("gate-first")["gate"].to("npu").requires_grad_()
    y = npu.swiglu(gate_up, activation=activation)
    with pytest.raises(RuntimeError, match=f"{operation(activation, 'plain')} of torch_npu has no second derivative"):
        torch.autograd.grad(y.sum(), gate_up, create_graph=True)


def test_where_a_gradient_is_a_formula_it_has_a_second_one(host_npu):
    ours, theirs = both("swish", "clamp-before-offset", "interleaved", limit=7.0)
    given = tensors("interleaved")["gate"]
    second = []
    for function, device in ((ours, "npu"), (theirs, "cpu")):
        gate_up = given.to(device).requires_grad_()
        (first,) = torch.autograd.grad(function(gate=gate_up).sum(), gate_up, create_graph=True)
        second += torch.autograd.grad(first.square().sum(), gate_up)
    torch.testing.assert_close(second[0].cpu(), second[1])


@pytest.fixture
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": "npu_fused_swiglu"})


MODULES = [
    (lambda: Separate(nn.SiLU()), "silu", "npu_swiglu"),
    (lambda: Separate(nn.GELU("tanh")), "gelu_tanh", "npu_geglu"),
    (lambda: Separate(GELUErf()), "gelu_erf", "npu_geglu"),
    (lambda: InOne(nn.SiLU(), "gate-first"), "silu gate-first", "npu_swiglu"),
    (lambda: InOne(nn.SiLU(), "gate-second"), "silu gate-second", "npu_swiglu"),
    (lambda: InOne(nn.SiLU(), "interleaved"), "silu interleaved", "npu_swiglu"),
    (lambda: Sparse(nn.GELU("tanh"), 0.9), "gelu_tanh sparse", "npu_geglu"),
    (Offset, "swish clamp-before-offset gate-first", "npu_clipped_swiglu"),
]


@pytest.mark.parametrize(
    ("make", "variant", "name", "dtype"),
    covering(
        ((*module, dtype) for module, dtype in itertools.product(MODULES, [BF16, SINGLE])),
        by=lambda make, variant, name, dtype: [name, dtype],
    ),
)
def test_it_is_what_apply_all_uses_on_an_npu(host_npu, manager, make, variant, name, dtype):
    model = nn.Sequential(make()).to("npu", dtype)
    before = {key: value.to("cpu", copy=True) for key, value in model.state_dict().items()}
    applied = manager.apply_all(model)
    (entry,) = applied.report.fused
    assert (entry.kernel_id, entry.variant, entry.check) == ("npu_fused_swiglu", variant, "passed")
    host_npu.calls.clear()
    model(torch.randn(2, 3, 24).to("npu", dtype)).float().square().mean().backward()
    assert host_npu.calls[name] == 1
    assert all(parameter.grad is not None for parameter in model.parameters())
    applied.undo()
    assert all(torch.equal(value.cpu(), before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("activation", "variant", "why"),
    [
        ("relu", "plain", "torch_npu has no operation that gates with relu"),
        ("quick_gelu", "plain", "torch_npu has no operation that gates with quick_gelu"),
        ("silu", "clamp-after", "torch_npu has no operation that gates with silu, clamped after it"),
        ("gelu", "clamp-before", "torch_npu has no operation that gates with gelu, clamped before it"),
    ],
)
def test_what_has_no_operation_is_said_to_have_none(activation, variant, why):
    assert npu.unsupported(activation, variant) == why


def test_every_combination_is_served_or_said_not_to_be():
    served = {pair for pair in itertools.product(ACTIVATIONS, VARIANTS) if npu.unsupported(*pair) is None}
    assert served == set(SERVED)


def test_what_has_no_operation_is_left_alone_and_the_report_says_why(host_npu, manager):
    model = nn.Sequential(Separate(ReLU2()), Separate(nn.SiLU())).to("npu")
    report = manager.apply_all(model).report
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


def test_a_cann_without_the_clipped_operation_lacks_only_that(host_npu, manager, monkeypatch):
    """torch_npu has it, and raises in the first call."""
    monkeypatch.delitem(here._KNOWN, "npu_clipped_swiglu")
    with HostNPU(lacking={"npu_clipped_swiglu"}) as old:
        ours, theirs = both("swish", "clamp-before-offset", "interleaved", limit=7.0)
        assert_right(ours, theirs, tensors("interleaved"), TOLERANCE)
        assert npu.unsupported("silu", "plain") is None
        report = manager.apply_all(nn.Sequential(Offset(), Separate(nn.SiLU())).to("npu")).report
    assert LACKING in report.left_alone[0].why_not
    assert [entry.paths for entry in report.fused] == [("1",)]
    assert old.calls["npu_swiglu"]
