"""Wrong arguments raise an error that says what to do, before anything is changed."""

import pytest
import torch
from support.kernels import NormKernel, variant_of
from support.models import Pipeline, Toy, inputs
from support.states import differing, state_of

from fuseplug import DiscoveryError, PlanError, RejectedError

pytestmark = pytest.mark.usefixtures("examined_once")

NOT_MODULES = {
    "expected a torch.nn.Module, found str 'gpt2': load or build the model first": lambda: "gpt2",
    "found the class Toy: load or build the model first": lambda: Toy,
    "found Pipeline .*: pass its .model": Pipeline,
    "found NoneType 'None'": lambda: None,
    "found dict": dict,
}


@pytest.mark.parametrize("method", ["plan", "apply_all", "applied_to", "undo"])
@pytest.mark.parametrize(("message", "make"), NOT_MODULES.items())
def test_what_is_no_module_is_refused(fusing, method, message, make):
    with pytest.raises(PlanError, match=message) as caught:
        getattr(fusing, method)(make())
    assert hasattr(caught.value, "found")


WRONG = {
    "unknown include": (
        {"include": "toy_nrom"},
        DiscoveryError,
        "no kernel or op 'toy_nrom' .*nearest installed: toy_norm",
    ),
    "unknown exclude": ({"exclude": ["toyrotery"]}, DiscoveryError, "nearest installed: .*toyrotary"),
    "nothing near": ({"include": "§"}, DiscoveryError, "'§' is installed; installed: toy_norm, toy_rotary"),
    "only": ({"only": "layers.*.nrom1"}, PlanError, r"only='layers.\*.nrom1' matches none of the .* near it: .*norm1"),
    "skip": ({"skip": ["norm", "layer.0"]}, PlanError, "skip='layer.0' matches none of .* near it: layers.0"),
    "mode": ({"mode": "train"}, PlanError, 'mode=\'train\' is unknown: expected "auto", "training" or "inference"'),
    "verify": ({"verify": "alway"}, PlanError, "verify='alway' is unknown: expected True, False or \"always\""),
    "consent": ({"allow": True}, PlanError, "expected a name, or a list of names, found True"),
    "a number as a glob": ({"only": ["norm", 3]}, PlanError, r"found \['norm', 3\]: write each name as a string"),
    "device": ({"device": "cdua"}, PlanError, "device='cdua' is unknown: .*did you mean 'cuda'"),
    "device by another name": ({"device": "gpu"}, PlanError, "did you mean 'cuda'"),
    "device index": ({"device": "cuda:x"}, PlanError, "device='cuda:x' is unknown"),
}


@pytest.mark.parametrize("method", ["plan", "apply_all"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused_and_nothing_is_changed(fusing, model, method, case):
    options, error, message = WRONG[case]
    before = state_of(model)
    with pytest.raises(error, match=message):
        getattr(fusing, method)(model, **options)
    assert not differing(before, state_of(model))


def test_an_unknown_name_is_refused_by_apply(fusing, model):
    before = state_of(model)
    with pytest.raises(DiscoveryError, match=r"no kernel or op 'toy_mron' is installed; nearest installed: .*toy_norm"):
        fusing.apply(["toy_rotary", "toy_mron"], model)
    assert not differing(before, state_of(model))


def test_the_order_of_the_arguments_of_apply_is_said(fusing, model):
    with pytest.raises(PlanError, match="found str 'toy_norm': apply takes the kernels first, then the model"):
        fusing.apply(model, "toy_norm")


def test_with_no_kernels_at_all_an_unknown_name_says_how_to_get_one(manager, model):
    with pytest.raises(DiscoveryError, match="pip install fuseplug-"):
        manager.apply("npu_fused_rmsnorm", model)


def test_with_no_kernels_at_all_nothing_happens(manager, model):
    report = manager.apply_all(model).report
    assert not report.entries
    assert "0 of 0 targets fused" in str(report)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"skip": "*"}, "this model has no module with this op"), ({"include": []}, "include= names no kernel")],
)
def test_if_nothing_is_left_to_plan_the_reason_is_whole(fusing, model, options, why):
    assert set(fusing.plan(model, **options).report.idle.values()) == {why}


def test_strict_raises_if_a_site_had_to_be_left_alone(manager, model):
    manager.register(variant_of(NormKernel, "bad", function="support.bad:zeros"))
    before, want = state_of(model), model(inputs())
    with pytest.raises(
        RejectedError, match=r"strict=True, and 5 targets .*layers.0.norm1 \(Norm\): bad: its numbers"
    ) as caught:
        manager.apply_all(model, strict=True)
    assert len(caught.value.report.left_alone) == 5
    assert not differing(before, state_of(model))
    assert torch.equal(model(inputs()), want)


def test_strict_is_silent_if_everything_is_fused(fusing, model):
    assert fusing.apply_all(model, strict=True).report.fused


def test_strict_does_not_mind_what_computes_something_else(fusing):
    class Other(Toy):
        def __init__(self):
            super().__init__()
            self.norm.__class__ = type("Doubled", (type(self.norm),), {"forward": lambda self, x: x * 2})

    report = fusing.apply_all(Other(), strict=True).report
    assert [entry.rejections[0][1].kind for entry in report.left_alone] == ["unlike"]


def test_what_is_no_kernel_is_not_registered(manager):
    with pytest.raises(DiscoveryError, match=r'function must be "package\.module:function"'):
        manager.register(variant_of(NormKernel, "wrong", function="nocolon"))
    assert not [record for record in manager.kernels() if record.state == "ready"]


@pytest.mark.parametrize("thing", [3, "kernel", NormKernel(), int])
def test_what_is_no_class_of_kernels_is_not_registered(manager, thing):
    with pytest.raises(DiscoveryError, match=r"is not a subclass of fuseplug.BaseKernel"):
        manager.register(thing)
