"""Applying and undoing are exact and repeatable, change one model only, and leave nothing behind."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from support import models
from support.kernels import GateKernel, NormKernel, RotaryKernel, ran, variant_of
from support.models import Toy, inputs, tiny_llama, tokens
from support.states import differing, state_of
from support.thorough import first_quick
from torch import nn

from fuseplug import Applied, PatchError, PlanError
from fuseplug.patching import journal

pytestmark = pytest.mark.usefixtures("checked_once")


def forwards(model):
    return {
        path: module.__dict__["forward"].__func__ for path, module in model.named_modules() if "forward" in vars(module)
    }


NORMS = {"layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2", "norm"}
ATTENTIONS = {"layers.0.attention", "layers.1.attention"}


def test_everything_that_fits_is_fused_and_what_runs(fusing, model):
    want = model(inputs())
    applied = fusing.apply_all(model)
    assert isinstance(applied, Applied)
    assert applied.lost == []
    assert {entry.paths[0] for entry in applied.report.fused} == NORMS | ATTENTIONS
    assert set(forwards(model)) == NORMS | ATTENTIONS
    ran.clear()
    torch.testing.assert_close(model(inputs()), want)
    assert ran == {"norm": 5, "rotary": 2}


UNDONE = {
    "never applied": lambda manager, model: manager.undo(model),
    "by its handle": lambda manager, model: manager.apply_all(model).undo(),
    "twice": lambda manager, model: [undo() for undo in [manager.apply_all(model).undo] * 2],
    "by the manager": lambda manager, model: [manager.apply_all(model), manager.undo(model)],
    "by another manager": lambda manager, model: [manager.apply_all(model), type(manager)(environ={}).undo(model)],
    "by another handle": lambda manager, model: [manager.apply_all(model), manager.applied_to(model).undo()],
    "of a part, by the whole": lambda manager, model: [manager.apply_all(model.layers[0]), manager.undo(model)],
    "of two calls, by the first handle": lambda manager, model: (
        manager.apply("toy_norm", model),
        manager.apply("toy_rotary", model),
    )[0].undo(),
}


@pytest.mark.parametrize("way", UNDONE)
def test_undo_is_exact(fusing, model, way):
    before, want = state_of(model), model(inputs())
    UNDONE[way](fusing, model)
    assert not differing(before, state_of(model))
    assert torch.equal(model(inputs()), want)
    assert fusing.applied_to(model) is None
    fusing.apply_all(model)
    assert differing(before, state_of(model))


def test_module_globals_are_what_they_were(fusing, model):
    gc.collect()
    before = dict(vars(models))
    fusing.apply_all(model).undo()
    gc.collect()
    assert vars(models) == before


def test_applying_again_puts_the_same_functions_in_the_same_places_and_reports_the_same(fusing, model):
    first = fusing.apply_all(model)
    before, functions = state_of(model), forwards(model)
    second = fusing.apply_all(model)
    assert not differing(before, state_of(model))
    assert all(forwards(model)[path] is function for path, function in functions.items())
    assert first.report.entries == second.report.entries


def test_modules_alike_share_one_function(fusing, model):
    fusing.apply_all(model)
    found = forwards(model)
    assert len({id(found[path]) for path in NORMS}) == 1
    assert len({id(found[path]) for path in ATTENTIONS}) == 1


def test_other_models_are_untouched(fusing, model):
    other = Toy().eval()
    before, want = state_of(other), other(inputs())
    fusing.apply_all(model)
    ran.clear()
    assert torch.equal(other(inputs()), want)
    assert not ran
    assert not differing(before, state_of(other))


def test_a_part_of_a_model_can_be_fused_alone(fusing, model):
    fusing.apply_all(model.layers[0])
    assert set(forwards(model)) == {path for path in NORMS | ATTENTIONS if path.startswith("layers.0.")}


# --- the with statement


def test_with_in_a_fused_model_takes_off_only_what_it_put_on(fusing, model):
    outer = fusing.apply("toy_norm", model)
    before = state_of(model)
    with fusing.apply_all(model):
        assert set(forwards(model)) == NORMS | ATTENTIONS
    assert not differing(before, state_of(model))
    assert fusing.applied_to(model).report is outer.report
    assert not fusing.applied_to(model).lost


def test_with_that_changed_nothing_takes_nothing_off(fusing, model):
    fusing.apply_all(model)
    before = state_of(model)
    with fusing.apply_all(model):
        pass
    assert not differing(before, state_of(model))


class Inheriting(models.Norm):
    @property
    def epsilon(self):
        return self.eps

    def forward(self, hidden_states):
        return super().forward(hidden_states) * (1.0 if self.epsilon else 2.0)


def test_a_second_call_changes_nothing_where_classes_have_what_is_looked_up(fusing):
    model = nn.Sequential(Inheriting(), models.Norm())
    fusing.apply_all(model)
    before = forwards(model)
    assert len(before) == 2
    fusing.apply_all(model)
    assert forwards(model) == before


def test_with_takes_off_when_its_body_raises(fusing, model):
    before = state_of(model)
    with pytest.raises(ZeroDivisionError), fusing.apply_all(model):
        1 / 0  # noqa: B018
    assert not differing(before, state_of(model))


def test_with_nested_three_deep_unwinds_layer_by_layer(manager, model):
    for kernel in (NormKernel, RotaryKernel, GateKernel):
        manager.register(kernel)
    states = [state_of(model)]
    with manager.apply("toy_norm", model):
        states.append(state_of(model))
        with manager.apply("toy_rotary", model):
            states.append(state_of(model))
            with manager.apply("toy_gate", model):
                pass
            assert not differing(states[2], state_of(model))
        assert not differing(states[1], state_of(model))
    assert not differing(states[0], state_of(model))


def test_handles_left_in_another_order_take_off_what_each_put_on(manager, model):
    manager.register(RotaryKernel)
    manager.register(GateKernel)
    before = state_of(model)
    outer, inner = manager.apply("toy_rotary", model), manager.apply("toy_gate", model)
    outer.__exit__(None, None, None)
    ran.clear()
    model(inputs())
    assert ran == {"gate": 2}
    inner.__exit__(None, None, None)
    assert not differing(before, state_of(model))


# --- all or none


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("nth", [1, 2, 4, 7])
def test_if_one_cannot_be_put_on_none_is(fusing, model, monkeypatch, nth, error):
    before = state_of(model)
    bind, count = journal.bind, []

    def failing(module, method, function):
        count.append(None)
        if len(count) == nth:
            raise error("half-way")
        return bind(module, method, function)

    monkeypatch.setattr(journal, "bind", failing)
    with pytest.raises(error, match="half-way"):
        fusing.apply_all(model)
    assert not differing(before, state_of(model))
    assert fusing.applied_to(model) is None


def test_a_module_replaced_between_plan_and_apply_stops_everything(fusing, model, monkeypatch):
    plan = fusing.plan(model)
    model.norm.forward = lambda x: x
    before = state_of(model)
    monkeypatch.setattr(fusing, "plan", lambda *args, **options: plan)
    with pytest.raises(PatchError, match=r"cannot replace forward of norm.*make a new plan"):
        fusing.apply_all(model)
    assert not differing(before, state_of(model))


def test_a_failed_second_call_leaves_the_first_in_place(fusing, model, monkeypatch):
    fusing.apply("toy_norm", model)
    before = state_of(model)
    with monkeypatch.context() as patching:
        patching.setattr(journal, "compose", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fusing.apply("toy_rotary", model)
    assert not differing(before, state_of(model))
    assert fusing.applied_to(model)


# --- copies


def test_a_deep_copy_computes_with_its_own_weights(fusing, model):
    fusing.apply_all(model)
    double = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in double.parameters():
            parameter.zero_()
    assert not torch.equal(model(inputs()), torch.zeros_like(inputs()))
    assert torch.equal(double(inputs()), torch.zeros_like(inputs()))


def test_a_copy_and_its_original_are_undone_each_by_itself(fusing, model):
    fusing.apply_all(model)
    before, double, third = state_of(model), copy.deepcopy(model), copy.deepcopy(model)
    fusing.undo(double)
    assert not forwards(double)
    assert not differing(before, state_of(model))
    fusing.undo(model)
    assert set(forwards(third)) == NORMS | ATTENTIONS
    ran.clear()
    torch.testing.assert_close(third(inputs()), model(inputs()))
    assert ran == {"norm": 5, "rotary": 2}


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Undecorated(nn.Module):
    """A module whose forward is a wrapper with another name, because the decorator omits functools.wraps."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6

    def decorated(function):
        def wrapper(self, x):
            return function(self, x)

        return wrapper

    forward = decorated(models.Norm.forward)


@pytest.mark.parametrize("through", [pickled, saved])
@pytest.mark.parametrize("make", [Toy, Undecorated])
def test_what_comes_out_of_a_file_is_unpatched_and_can_be_fused_again(fusing, through, make):
    model = make().eval()
    want = model(inputs())
    fusing.apply_all(model)
    loaded = through(model)
    ran.clear()
    assert torch.equal(loaded(inputs()), want)
    assert not ran
    assert fusing.applied_to(loaded) is None
    before = state_of(loaded)
    report = fusing.apply_all(loaded).report
    assert not report.left_alone
    loaded(inputs())
    assert ran["norm"]
    fusing.undo(loaded)
    assert not differing(before, state_of(loaded))


@pytest.mark.parametrize("through", [copy.deepcopy, pickled])
def test_a_wrapped_forward_that_says_another_name_is_known_and_taken_off(fusing, through):
    model = Undecorated()
    applied = fusing.apply_all(model)
    assert fusing.applied_to(model)
    through(model)
    applied.undo()
    assert "forward" not in vars(model)


# --- state


def test_the_state_dict_is_the_same(fusing, model):
    before = model.state_dict()
    fusing.apply_all(model)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(before[name].data_ptr() == after[name].data_ptr() for name in before)


def test_save_pretrained_and_from_pretrained_know_nothing_of_it(fusing, tmp_path):
    model = tiny_llama().eval()
    want = model(tokens()).logits
    fusing.apply_all(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    ran.clear()
    assert torch.equal(loaded(tokens()).logits, want)
    assert not ran
    assert set(loaded.state_dict()) == set(model.state_dict())


# --- nothing is left behind


def aliases():
    return sum(name.startswith("_fuseplug") for name in vars(models))


@pytest.mark.parametrize("how", first_quick(["undo", "with", "again"]))
def test_rounds_leave_nothing_behind(fusing, how, monkeypatch):
    model = Toy(layers=1).eval()
    before, want = state_of(model), model(inputs())
    options = {"verify": False}
    applied = []

    def rounds(count):
        for _ in range(count):
            if how == "with":
                with fusing.apply_all(model, **options):
                    pass
            elif how == "undo":
                fusing.apply_all(model, **options).undo()
            else:
                applied[:] = [fusing.apply_all(model, **options)]
        gc.collect()
        return len(gc.get_objects()), aliases()

    rounds(3)
    first = rounds(3)
    last = rounds(8)
    assert last[1] == first[1]
    assert last[0] - first[0] < 8, "objects stay behind"
    fusing.undo(model)
    assert not differing(before, state_of(model))
    assert torch.equal(model(inputs()), want)


@pytest.mark.parametrize("undone", [False, True])
def test_a_dropped_model_is_freed_whatever_else_is_kept(fusing, undone):
    model = Toy()
    plan = fusing.plan(model)
    applied = fusing.apply_all(model)
    handle = fusing.applied_to(model)
    if undone:
        applied.undo()
    gone = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert not any(reference() for reference in gone)
    applied.undo()
    assert (plan.report, applied.lost, handle.lost) == (plan.report, [], [])


# --- lost


def test_after_undo_everything_is_lost(fusing, model):
    applied = fusing.apply_all(model)
    applied.undo()
    assert {patch.path for patch in applied.lost} == NORMS | ATTENTIONS


def test_a_kernel_asked_for_by_op_needs_one_of_its_kind_only(manager, model):
    manager.register(NormKernel)
    manager.register(variant_of(NormKernel, "elsewhere_norm", device_types=("npu",)))
    report = manager.apply("toynorm", model).report
    assert {entry.kernel_id for entry in report.fused} == {"toy_norm"}


def test_a_plan_is_applied_to_its_model_and_to_no_other(manager, model):
    manager.register(NormKernel)
    plan = manager.plan(model)
    other = copy.deepcopy(model)
    with pytest.raises(PlanError, match="the plan was made for another model"):
        manager.apply_plan(other, plan)
    assert manager.applied_to(other) is None
    assert len(manager.apply_plan(model, plan).report.fused) == len(plan.report.fused) > 0
