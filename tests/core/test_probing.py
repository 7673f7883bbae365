"""Planning depends on nothing that surrounds it, leaves no trace, and tells apart what differs."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy
import pytest
import torch
from support import kernels
from support.ambient import default, default_device
from support.kernels import NormKernel, ran, variant_of
from support.models import MLP, Attention, CastLastNorm, Norm, Toy, gelu_mlp, inputs
from support.states import differing, state_of
from torch import nn
from torch._subclasses import FakeTensorMode

from fuseplug import PlanError
from fuseplug_verify import StandIns, Subject
from fuseplug_verify.verification import kernel_check

AMBIENT = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64 by default": lambda: default(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 by default": lambda: default(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta context": lambda: torch.device("meta"),
    "meta by default": lambda: default_device("meta"),
    "fake tensors": FakeTensorMode,
    "deterministic": lambda: default(torch.use_deterministic_algorithms, True, False),
}


def gist(report):
    return [(e.paths, e.kernel_id, e.variant, e.check, e.rejections) for e in report.entries]


@pytest.mark.parametrize("ambient", AMBIENT)
def test_a_plan_is_the_same_whatever_is_ambient_and_that_is_so_afterwards(fusing, ambient):
    module = nn.Sequential(Norm(), Attention())
    with AMBIENT[ambient]():
        before = surroundings()
        report = fusing.plan(module).report
        assert surroundings() == before
    assert gist(report) == [
        (("0",), "toy_norm", "llama", "passed", ()),
        (("1",), "toy_rotary", "plain", "passed", ()),
    ]


def surroundings():
    made = torch.empty(1)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        made.device,
        type(made),
    )


@pytest.mark.parametrize("ambient", AMBIENT)
def test_kernels_see_nothing_of_what_is_ambient(manager, ambient):
    seen = []

    def looking(self, site):
        seen.append(surroundings())
        return NormKernel.match(self, site)

    manager.register(variant_of(NormKernel, match=looking))
    with AMBIENT[ambient]():
        manager.plan(Norm())
    assert seen == [(True, False, False, torch.float32, torch.device("cpu"), torch.Tensor)]


@pytest.mark.parametrize("ambient", ["no_grad", "inference_mode", "autocast", "meta context"])
def test_a_model_applied_in_strange_surroundings_trains_outside(fusing, ambient):
    model = Toy()
    with AMBIENT[ambient]():
        fusing.apply_all(model)
    model(inputs()).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "norm" in name)


def test_random_states_are_what_they_were(fusing, model):
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)

    def careless(self, site):
        torch.rand(3), random.random(), numpy.random.rand()
        return NormKernel.match(self, site)

    fusing.register(variant_of(NormKernel, "careless", match=careless))
    fusing.plan(model)
    found = torch.rand(1).item(), random.random(), numpy.random.rand()
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    assert found == (torch.rand(1).item(), random.random(), numpy.random.rand())


class Dropping(Norm):
    def forward(self, hidden_states):
        return nn.functional.dropout(super().forward(hidden_states), 0.5, self.training)


def test_eight_threads_plan_alike_and_leave_no_trace(fusing):
    torch.manual_seed(5)
    want_next = torch.rand(1)
    torch.manual_seed(5)
    made = [(Norm, CastLastNorm)[i % 2]() for i in range(8)]
    torch.manual_seed(5)
    want = [gist(fusing.plan(each).report) for each in made]
    with default(torch.set_default_dtype, torch.float64, torch.float32), ThreadPoolExecutor(8) as pool:
        found = [gist(plan.report) for plan in pool.map(fusing.plan, made)]
        assert torch.get_default_dtype() is torch.float64
    assert found == want
    assert torch.equal(torch.rand(1), want_next)


def test_live_tensors_are_never_touched(fusing, model):
    model(inputs()).sum().backward()
    tensors = [*model.parameters(), *model.buffers()]
    held = [(t, t._version, t.data_ptr(), t.requires_grad, t.grad, t.grad._version, t.clone()) for t in tensors]
    before = state_of(model)
    fusing.plan(model)
    for t, version, pointer, requires_grad, grad, grad_version, value in held:
        assert (t._version, t.data_ptr(), t.requires_grad) == (version, pointer, requires_grad)
        assert t.grad is grad
        assert grad._version == grad_version
        assert torch.equal(t, value)
    assert not differing(before, state_of(model))


def test_hooks_are_never_called_while_planning(fusing, model):
    called = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: called.append(args))
        module.register_forward_pre_hook(lambda *args: called.append(args))
        module.register_full_backward_hook(lambda *args: called.append(args))
    fusing.plan(model)
    assert not called


# --- meta and other devices


def test_a_model_on_meta_is_planned_with_its_check_pending(fusing):
    model = Toy().to("meta")
    report = fusing.plan(model).report
    assert {(entry.fused, entry.check, entry.device_type) for entry in report.entries} == {(True, "pending", "cpu")}
    assert any("kernel check pending" in note for note in report.notes)


def test_a_model_for_a_device_that_is_not_here_is_pending_there(manager, model):
    manager.register(variant_of(NormKernel, "there", device_types=("npu",)))
    report = manager.plan(model, device="npu:1").report
    assert {(entry.kernel_id, entry.check, entry.device_type) for entry in report.entries} == {
        ("there", "pending", "npu")
    }


def test_what_was_pending_is_checked_once_the_model_is_there(manager):
    manager.register(variant_of(NormKernel, "bad", function="support.bad:zeros"))
    model = Norm().to("meta")
    assert manager.apply_all(model).report.entries[0].check == "pending"
    model = model.to_empty(device="cpu")
    assert manager.apply_all(model).report.entries[0].rejections[0][1].kind == "failed"


def test_verify_false_leaves_the_kernel_unrun(manager, model):
    manager.register(NormKernel)
    report = manager.plan(model, verify=False).report
    assert {entry.check for entry in report.fused} == {"skipped"}
    assert not ran


# --- alike


def alike(one, other):
    stand_ins = StandIns()
    return stand_ins.likeness(one) == stand_ins.likeness(other)


def with_(module, **attributes):
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)
    return module


def deep(module):
    return nn.Sequential(nn.Sequential(module))


DIFFERENT = {
    "class": (Norm, CastLastNorm),
    "eps": (Norm, lambda: Norm(eps=1e-5)),
    "size": (Norm, lambda: Norm(32)),
    "dtype": (Norm, lambda: Norm().bfloat16()),
    "training": (Norm, lambda: Norm().eval()),
    "child": (MLP, gelu_mlp),
    "1 and 1.0": (lambda: with_(Norm(), n=1), lambda: with_(Norm(), n=1.0)),
    "1 and True": (lambda: with_(Norm(), n=1), lambda: with_(Norm(), n=True)),
    "0 and None": (lambda: with_(Norm(), n=0), lambda: with_(Norm(), n=None)),
    "in a list": (lambda: with_(Norm(), n=[1, 2]), lambda: with_(Norm(), n=[1, 2.0])),
    "list and tuple": (lambda: with_(Norm(), n=[1]), lambda: with_(Norm(), n=(1,))),
    "in a dict": (lambda: with_(Norm(), n={"a": 1}), lambda: with_(Norm(), n={"a": 2})),
    "buffer value": (lambda: with_(Norm(), b=torch.ones(2)), lambda: with_(Norm(), b=torch.zeros(2))),
    "buffer dtype": (lambda: with_(Norm(), b=torch.zeros(2)), lambda: with_(Norm(), b=torch.zeros(2).int())),
    "buffer sign": (lambda: with_(Norm(), b=torch.zeros(1)), lambda: with_(Norm(), b=-torch.zeros(1))),
    "tensor in a list": (lambda: with_(Norm(), n=[torch.ones(1)]), lambda: with_(Norm(), n=[torch.zeros(1)])),
    "function": (lambda: with_(Norm(), f=torch.sin), lambda: with_(Norm(), f=torch.cos)),
    "attribute missing": (Norm, lambda: with_(Norm(), more=1)),
    "grandchild": (lambda: deep(nn.SiLU()), lambda: deep(nn.GELU())),
    "grandchild's scalar": (lambda: deep(nn.GELU()), lambda: deep(nn.GELU(approximate="tanh"))),
    "child missing": (lambda: nn.ModuleDict({"a": Norm()}), lambda: nn.ModuleDict({"b": Norm()})),
    "bias": (lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2, bias=False)),
}


@pytest.mark.parametrize("pair", DIFFERENT)
def test_what_differs_is_not_taken_for_alike(pair):
    one, other = (make() for make in DIFFERENT[pair])
    assert not alike(one, other)


@pytest.mark.parametrize("pair", DIFFERENT)
def test_what_is_made_alike_is_alike(pair):
    make = DIFFERENT[pair][0]
    assert alike(make(), make())


def test_hooks_patches_and_values_of_parameters_make_no_difference(fusing):
    one, other = Norm(), Norm()
    with torch.no_grad():
        one.weight.zero_()
    one.register_forward_hook(lambda *args: None)
    fusing.apply_all(one)
    assert alike(one, other)


def test_what_is_alike_is_verified_once(fusing, monkeypatch):
    runs = []
    run = Subject.run
    monkeypatch.setattr(Subject, "run", lambda *args, **options: runs.append(args) or run(*args, **options))
    fusing.plan(Norm())
    once = len(runs)
    fusing.plan(nn.ModuleList([Norm() for _ in range(6)]))
    assert len(runs) == 2 * once
    fusing.plan(nn.ModuleList([Norm(eps=1e-6), Norm(eps=1e-5)]))
    assert len(runs) == 4 * once


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, NotImplementedError])
def test_a_truth_that_the_device_cannot_compute_is_computed_on_the_cpu(fusing, model, monkeypatch, error):
    run, where = Subject.run, []

    def cramped(*arguments, **how):
        if how.get("dtype") is torch.float64:
            where.append(str(how.get("device")))
            if "device" in how:
                raise error
        return run(*arguments, **how)

    monkeypatch.setattr(Subject, "run", cramped)
    monkeypatch.setattr(kernel_check, "_WITH_FLOAT64", ("cpu",))
    assert all(entry.check == "passed" for entry in fusing.plan(model).report.entries)
    assert where == ["cpu", "None"] * (len(where) // 2) != []


# --- variants


@pytest.mark.parametrize("mix", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_variants_within_tolerance_of_each_other_are_told_apart(manager, mix):
    manager.register(variant_of(NormKernel, mixes=(mix,)))
    report = manager.plan(nn.Sequential(Norm(), CastLastNorm()).to(mix[1])).report
    assert [entry.variant for entry in report.entries] == ["llama", "cast-last"]


def test_a_module_that_differs_only_in_training_is_refused(manager):
    manager.register(NormKernel)
    assert manager.plan(Dropping().eval()).report.entries[0].rejections[0][1].kind == "unlike"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_on_or_off_as_before(fusing, enabled):
    was_on = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        fusing.plan(Norm())
        with pytest.raises(PlanError):
            fusing.plan(Norm(), only="nowhere")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_on else gc.disable)()


def test_an_example_may_give_attributes_other_values_and_leaves_the_module_its_own(manager):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def forward(self, x):
            return x * self.scale

    class Unscaling(kernels.Adapter):
        variant = "unscaled"

        def bind(self, compute):
            return lambda module, x: x * 1.0

    class Kernel(kernels.BaseKernel):
        kernel_id, op, reference = "scaling", "scale", "torch:clone"
        function = "torch:clone"

        def match(self, site):
            if not isinstance(site.module, Scaled):
                return None
            example = lambda scale, size, generator: kernels.Example((torch.ones(4, 4),), attributes={"scale": scale})  # noqa: E731
            return [kernels.Proposal(kernels.Target(), (Unscaling(),), example, tuple(scales))]

    manager.register(Kernel)
    module, scales = Scaled(), [1.0]
    assert len(manager.plan(module, verify=False).patches) == 1
    scales.append(0.5)
    assert not manager.plan(module, verify=False).patches, "a scale that happens to be 1 is seen to be used"
    assert module.scale == 1.0
