"""Shared modules, foreign forwards, unusual calls, several kernels for one target, and parents that cover."""

import inspect

import pytest
import torch
from support.kernels import (
    AttentionKernel,
    ExpertsKernel,
    GateKernel,
    NormKernel,
    RotaryKernel,
    ran,
    variant_of,
)
from support.models import Experts, Norm, Toy, inputs
from support.states import differing, state_of
from torch import nn

pytestmark = pytest.mark.usefixtures("checked_once")


def entry_of(report, path):
    (entry,) = [entry for entry in report.entries if path in entry.paths]
    return entry


# --- shared


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = Norm()
        self.two = nn.Sequential(self.one)

    def forward(self, x):
        return self.two(self.one(x))


def test_a_shared_module_is_reported_once_with_all_its_paths_and_runs_fused_at_each(fusing):
    model = Shared()
    report = fusing.apply_all(model).report
    assert [entry.paths for entry in report.entries] == [("one", "two.0")]
    ran.clear()
    model(inputs())
    assert ran["norm"] == 2


@pytest.mark.parametrize("skip", ["one", "two", "two.0", "tw*"])
def test_skipping_one_path_of_a_shared_module_skips_it(fusing, skip):
    report = fusing.apply_all(Shared(), skip=skip).report
    assert not report.entries


# --- replaced by others


def foreign(self, x):
    return x * 0


@pytest.mark.parametrize(
    "put",
    [lambda m: foreign.__get__(m), lambda m: lambda x: x * 0, lambda m: Norm().forward],
    ids=["bound", "lambda", "other's"],
)
def test_a_forward_that_somebody_replaced_is_foreign_and_untouched(fusing, model, put):
    model.norm.forward = put(model.norm)
    before = state_of(model)["norm"][""]["forward"]
    report = fusing.apply_all(model).report
    ((kernel, rejection),) = entry_of(report, "norm").rejections
    assert (kernel, rejection.kind) == ("fuseplug", "foreign")
    assert "replaced on this instance by" in rejection.reason
    assert model.norm.forward == before
    assert len(report.fused) == 6
    fusing.undo(model)
    assert model.norm.forward == before


def test_a_foreign_forward_that_says_it_wraps_ours_and_does_not_call_it_is_not_taken_for_ours(fusing, model):
    import functools
    import types

    applied = fusing.apply_all(model)

    @functools.wraps(model.norm.forward.__func__)
    def timed(self, *args):
        return type(self).forward(self, *args)

    model.norm.forward = types.MethodType(timed, model.norm)
    assert [patch.path for patch in applied.lost] == ["norm"]
    again = fusing.apply_all(model)
    assert entry_of(again.report, "norm").rejections[0][1].kind == "foreign"
    assert model.norm.forward.__func__ is timed


def zeros(self, hidden_states):
    return hidden_states * 0


def equivalent(self, hidden_states):
    return Norm.__original__(self, hidden_states)


def test_a_class_level_monkeypatch_is_judged_by_what_it_does(fusing, model, monkeypatch):
    monkeypatch.setattr(Norm, "__original__", Norm.forward, raising=False)
    monkeypatch.setattr(Norm, "forward", equivalent)
    assert entry_of(fusing.apply_all(model).report, "norm").fused
    monkeypatch.setattr(Norm, "forward", zeros)
    fusing.undo(model)
    entry = entry_of(fusing.apply_all(model).report, "norm")
    assert entry.rejections[0][1].kind == "unlike"
    assert torch.equal(model(inputs()), inputs() * 0)


# --- calls


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2), {}), ((inputs(),), {"hidden_states": inputs()}), ((), {"x": 1}), ((inputs(), 1), {})],
)
def test_a_wrong_call_raises_what_the_original_raises(fusing, args, kwargs):
    norm = Norm()
    with pytest.raises(TypeError) as want:
        norm(*args, **kwargs)
    fusing.apply_all(norm)
    with pytest.raises(TypeError) as found:
        norm(*args, **kwargs)
    assert str(found.value) == str(want.value)


class Peeking(Norm):
    """A norm whose decorator looks at how it was called, as decorators of transformers do."""

    def _peeking(function):
        import functools

        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            result = function(self, *args, **kwargs)
            return -result if "scale" in kwargs else result

        return wrapper

    @_peeking
    def forward(self, hidden_states, scale=None):
        return Norm.forward(self, hidden_states) * (1 if scale is None else scale)


def test_the_original_gets_the_call_as_it_was_made(fusing):
    norm = Peeking()
    by_name, by_position = norm(hidden_states=inputs(), scale=2), norm(inputs(), 2)
    assert fusing.apply_all(norm).report.fused
    assert torch.equal(by_name, -by_position)
    assert torch.equal(norm(hidden_states=inputs(), scale=2), by_name)
    assert torch.equal(norm(inputs(), 2), by_position)


@pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 1), (torch.float16, 0)])
def test_what_autocast_gives_a_module_is_fused_and_no_other_dtype_than_its_own(fusing, dtype, times):
    norm = Norm()
    want = norm(inputs(dtype=dtype))
    fusing.apply_all(norm)
    ran.clear()
    found = norm(inputs(dtype=dtype))
    assert ran["norm"] == times
    torch.testing.assert_close(found, want)


class Counted(torch.Tensor):
    pass


def test_a_tensor_subclass_goes_to_the_original(fusing):
    norm = Norm()
    want = norm(inputs())
    fusing.apply_all(norm)
    ran.clear()
    found = norm(inputs().as_subclass(Counted))
    assert type(found) is Counted
    assert torch.equal(found.as_subclass(torch.Tensor), want)
    assert not ran


def test_a_parameter_as_input_runs_the_kernel(fusing):
    norm = Norm()
    fusing.apply_all(norm)
    ran.clear()
    norm(nn.Parameter(inputs()))
    assert ran["norm"] == 1


def test_signatures_are_preserved(fusing, model):
    before = {path: inspect.signature(module.forward) for path, module in model.named_modules()}
    fusing.apply_all(model)
    assert {path: inspect.signature(module.forward) for path, module in model.named_modules()} == before


# --- several kernels for one target


RANKED = {
    "the id decides between equals": ({"b": {}, "a": {}}, {}, "a", ("b",)),
    "priority goes before the id": ({"a": {}, "b": {"priority": 1}}, {}, "b", ("a",)),
    "naming the device goes before priority": (
        {"a": {"priority": 9}, "b": {"device_types": ("npu", "cpu")}}, {}, "b", ("a",)
    ),
    "the caller's order goes before all": (
        {"a": {"priority": 9, "device_types": ("cpu",)}, "b": {}}, {"include": ["b", "a"]}, "b", ("a",)
    ),
    "the caller's order may name ops": ({"a": {}, "b": {}}, {"include": ["b", "toynorm"]}, "b", ("a",)),
    "what is excluded takes no part": ({"a": {}, "b": {}}, {"exclude": "a"}, "b", ()),
    "what has no gradient is not for training": ({"a": {"differentiable": False}, "b": {}}, {}, "b", ()),
    "what has no gradient is for inference": (
        {"a": {"differentiable": False}, "b": {}}, {"mode": "inference"}, "a", ("b",)
    ),
    "what the machine cannot run leaves it to the next": (
        {"a": {"unavailable": lambda self, kind: "needs a driver"}, "b": {}}, {}, "b", ()
    ),
}  # fmt: skip


@pytest.mark.parametrize(("declared", "options", "winner", "outranked"), RANKED.values(), ids=list(RANKED))
def test_of_several_kernels_one_wins(manager, declared, options, winner, outranked):
    for kernel_id, how in declared.items():
        manager.register(variant_of(NormKernel, kernel_id, **how))
    (entry,) = manager.apply_all(Norm(), **options).report.entries
    assert (entry.kernel_id, entry.outranked) == (winner, outranked)


def test_a_better_kernel_takes_the_place_of_ours_and_undo_is_still_exact(manager):
    model = Norm()
    before = state_of(model)
    manager.register(variant_of(NormKernel, "b"))
    first = manager.apply_all(model)
    manager.register(variant_of(NormKernel, "a", function="support.kernels:other_norm"))
    second = manager.apply_all(model)
    ran.clear()
    model(inputs())
    assert ran == {"other": 1}
    assert (len(first.lost), len(second.lost)) == (1, 0)
    second.undo()
    assert not differing(before, state_of(model))


# --- methods and the functions they call


@pytest.fixture
def all_kernels(manager):
    for kernel in (NormKernel, RotaryKernel, GateKernel, AttentionKernel):
        manager.register(kernel)
    return manager


def test_a_method_that_is_replaced_covers_the_functions_it_called(all_kernels, model):
    report = all_kernels.apply_all(model).report
    entries = {str(e.target): e for e in report.entries if e.paths[0] == "layers.0.attention"}
    assert entries["forward"].fused
    for function in ("forward:apply_rotary", "forward:apply_gate"):
        assert not entries[function].fused
        assert entries[function].covered_by == "layers.0.attention"
    ran.clear()
    model(inputs())
    assert ran == {"norm": 5, "attention": 2}


def test_two_functions_of_one_method_may_come_in_two_calls(all_kernels, model):
    before = state_of(model)
    first = all_kernels.apply("toy_rotary", model)
    second = all_kernels.apply("toy_gate", model)
    assert (first.lost, second.lost) == ([], [])
    ran.clear()
    model(inputs())
    assert ran == {"rotary": 2, "gate": 2}
    second.undo()
    assert not differing(before, state_of(model))


def test_two_calls_in_either_order_are_one_function(all_kernels, model):
    all_kernels.apply("toy_rotary", model)
    all_kernels.apply("toy_gate", model)
    one = model.layers[0].attention.forward.__func__
    other = Toy().eval()
    all_kernels.apply("toy_gate", other)
    all_kernels.apply("toy_rotary", other)
    assert other.layers[0].attention.forward.__func__ is one


def test_a_whole_method_takes_the_place_of_its_functions(all_kernels, model):
    before = state_of(model)
    first = all_kernels.apply(["toy_rotary", "toy_gate"], model)
    all_kernels.apply("toy_attention", model)
    assert len(first.lost) == 4
    ran.clear()
    model(inputs())
    assert ran == {"attention": 2}
    all_kernels.undo(model)
    assert not differing(before, state_of(model))


# --- parents that cover


@pytest.fixture
def covering(manager):
    for kernel in (NormKernel, ExpertsKernel):
        manager.register(kernel)
    return manager


def test_a_fused_parent_covers_the_children_it_no_longer_calls(covering):
    model = nn.ModuleDict({"block": Experts(), "norm": Norm()})
    report = covering.apply_all(model).report
    assert entry_of(report, "block").fused
    assert entry_of(report, "norm").fused
    for child in ("block.experts.0", "block.experts.1"):
        assert entry_of(report, child).covered_by == "block"
        assert "covered by block" in entry_of(report, child).why_not
    ran.clear()
    model["block"](inputs())
    assert ran == {"experts": 1}


def test_a_model_that_is_the_parent_itself_covers_too(covering):
    report = covering.apply_all(Experts()).report
    assert entry_of(report, "").fused
    assert not entry_of(report, "experts.0").fused
    assert "covered by the model" in entry_of(report, "experts.0").why_not


def test_covering_a_list_covers_what_is_in_it(manager):
    manager.register(NormKernel)
    manager.register(variant_of(ExpertsKernel, "wide", covers=("experts",)))
    report = manager.apply_all(nn.ModuleDict({"block": Experts()})).report
    assert [entry.fused for entry in report.entries] == [True, False, False]


def test_a_parent_that_is_not_fused_covers_nothing(manager):
    manager.register(NormKernel)
    manager.register(variant_of(ExpertsKernel, "bad", function="support.bad:nothing"))
    report = manager.apply_all(nn.ModuleDict({"block": Experts()})).report
    assert [entry.fused for entry in report.entries] == [False, True, True]


def test_a_child_that_somebody_else_still_calls_is_fused(covering):
    block = Experts()
    model = nn.ModuleDict({"block": block, "elsewhere": block.experts[0]})
    report = covering.apply_all(model).report
    assert entry_of(report, "elsewhere").fused
    assert entry_of(report, "block.experts.1").covered_by == "block"


def test_children_of_a_shared_parent_are_covered_at_all_its_paths(covering):
    block = Experts()
    report = covering.apply_all(nn.ModuleDict({"one": block, "two": block})).report
    assert not entry_of(report, "one.experts.0").fused


def test_only_a_child_is_fused_if_only_the_child_is_asked_for(covering):
    model = nn.ModuleDict({"block": Experts()})
    report = covering.apply_all(model, only="block.experts.1").report
    assert [entry.paths[0] for entry in report.fused] == ["block.experts.1"]
