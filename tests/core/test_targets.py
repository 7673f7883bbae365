"""Proposals for several targets, for some calls only, with a lazy result, and with the user's consent."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from support import heads
from support.heads import FreeSumKernel, Model, Scores, SumKernel, UnscopedSumKernel, ran
from support.kernels import NormKernel, RotaryKernel, variant_of
from support.managers import manager_of
from support.models import Norm, apply_rotary
from torch import nn

from fuseplug import Consent, RejectedError, Scope, Target, UndoError

X = torch.linspace(-1, 1, 48).view(2, 3, 8)

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture(autouse=True)
def _uncounted():
    ran.clear()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def step(model, **kwargs):
    model.zero_grad()
    loss, scores = model(X, labels=True, **kwargs)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()], scores


# --- a path and a scope


def test_a_module_below_the_site_is_replaced(model):
    want = step(model)
    applied = manager_of(FreeSumKernel).apply_all(model)
    ran.clear()
    (entry,) = applied.report.fused
    assert (entry.paths, str(entry.target)) == (("",), "head.forward")
    got = step(model)
    assert ran["sum"] == 1
    torch.testing.assert_close(got[:2], want[:2])
    assert torch.equal(got[2], want[2])


def test_outside_the_scope_the_original_runs(model):
    want = model(X)[1]
    applied = manager_of(FreeSumKernel).apply_all(model)
    got = model(X)[1]
    assert type(got) is torch.Tensor
    assert torch.equal(got, want)
    assert type(model.head(X)) is torch.Tensor
    (calls,) = applied.calls()
    assert (calls.fused, calls.original) == (0, 2)
    assert "outside the kernel's scope" in applied.try_(X).not_reached[0].reasons[0]


@pytest.mark.parametrize(
    "call", [lambda m: m(X, True), lambda m: m(x=X, labels=True), lambda m: m(X, labels=True, y=1)]
)
def test_a_scope_sees_the_call_however_it_is_written(call, model):
    manager_of(FreeSumKernel).apply_all(model)
    assert type(call(model)[1]) is Scores


def test_a_call_without_the_scope_inside_one_with_it_is_outside(model):
    class Outer(Model):
        def forward(self, x, labels=None):
            inner = self.inner(x)[1]
            return super().forward(x, labels)[0] + inner.sum(), inner

    outer = Outer()
    outer.inner = model
    manager_of(FreeSumKernel).apply_all(outer)
    ran.clear()
    _, inner = outer(X, labels=True)
    assert type(inner) is torch.Tensor
    assert ran["sum"] == 1


def test_a_module_belongs_to_the_outermost_site(model):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, labels=None):
            return self.model(x, labels)

    class Both(FreeSumKernel):
        def match(self, site):
            inner = site.module.model if isinstance(site.module, Outer) else site.module
            found = super().match(replace(site, module=inner))
            path = "model.head" if inner is not site.module else "head"
            return found and [replace(each, target=Target(path=path)) for each in found]

    report = manager_of(variant_of(Both)).apply_all(Outer()).report
    assert [entry.paths for entry in report.fused] == [("",)]
    assert "fused already, together with the model" in report.left_alone[0].why_not


def test_a_condition_that_raises_is_none_that_holds(model):
    def raising(module, arguments):
        raise KeyError("what")

    manager_of(variant_of(FreeSumKernel, scope=Scope(raising))).apply_all(model)
    assert type(step(model)[2]) is torch.Tensor


def test_a_scope_leaves_the_call_and_its_errors_as_they_are(model):
    manager_of(FreeSumKernel).apply_all(model)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        model()
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        model(X, x=X)


def test_a_method_without_a_scope_to_go_around_is_a_reason(model):
    report = manager_of(variant_of(FreeSumKernel, scope=Scope(heads.with_labels, "nothing"))).apply_all(model).report
    assert "Model.nothing is not a plain method" in report.left_alone[0].why_not


def test_a_path_that_is_not_there_is_a_reason(model):
    class Lost(FreeSumKernel):
        def changed(self, proposal):
            return replace(proposal, target=Target(path="foot"))

    report = manager_of(variant_of(Lost)).apply_all(model).report
    assert "its foot is not a planned module" in report.left_alone[0].why_not


def test_a_head_that_the_user_skips_is_left_alone(model):
    report = manager_of(FreeSumKernel).apply_all(model, skip="head").report
    assert "left out" in report.left_alone[0].why_not
    assert type(step(model)[2]) is torch.Tensor


# --- afterwards


def test_undo_leaves_nothing(model):
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    want = step(model)
    applied = manager_of(FreeSumKernel).apply_all(model)
    applied.undo()
    assert {path: dict(module.__dict__) for path, module in model.named_modules()} == before
    assert torch.equal(step(model)[0], want[0])


def test_a_second_call_changes_nothing(model):
    manager = manager_of(FreeSumKernel)
    manager.apply_all(model)
    held = model.__dict__["forward"], model.head.__dict__["forward"]
    second = manager.apply_all(model)
    assert (model.__dict__["forward"], model.head.__dict__["forward"]) == held
    assert not second.lost
    manager.undo(model)
    assert "forward" not in vars(model)


def test_what_is_lost_is_named_and_the_original_runs(model):
    applied = manager_of(FreeSumKernel).apply_all(model)
    del model.__dict__["forward"]
    assert [patch.path for patch in applied.lost] == [""]
    assert type(step(model)[2]) is torch.Tensor


def test_somebody_elses_forward_is_not_taken_off(model):
    applied = manager_of(FreeSumKernel).apply_all(model)
    model.forward = lambda x: x
    with pytest.raises(UndoError):
        applied.undo()
    assert "forward" not in vars(model.head)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied, model):
    manager = manager_of(FreeSumKernel)
    manager.apply_all(model)
    twin = copied(model)
    loss = step(twin)[0]
    torch.testing.assert_close(loss, step(model)[0])
    manager.undo(twin)
    assert type(step(twin)[2]) is torch.Tensor
    assert type(step(model)[2]) is Scores


class Rotating(Model):
    """A model with two replacements in one method: a scope around it, and a function that it looks up."""

    def forward(self, x, labels=None, **kwargs):
        cos, sin = x.cos(), x.sin()
        x, _ = apply_rotary(x, x, cos, sin)
        scores = self.head(self.body(x))
        return (scores if labels is None else scores.float().sum()), scores


def test_it_goes_around_what_is_replaced_in_the_same_method():
    model = Rotating()
    want = step(model)[:1]
    manager = manager_of(FreeSumKernel, RotaryKernel)
    applied = manager.apply_all(model)
    assert {str(entry.target) for entry in applied.report.fused} == {"head.forward", "forward:apply_rotary"}
    for only in ("toy_free_sum", "toy_rotary"):
        manager.apply(only, model)  # replacements that are in place stay
    torch.testing.assert_close(step(model)[:1], want)
    assert all(calls.fused and not calls.original for calls in applied.calls())
    applied.undo()
    assert "forward" not in vars(model)


def test_compiled_as_a_whole_it_is_the_original(model):
    want = step(model)
    applied = manager_of(FreeSumKernel).apply_all(model)
    model.zero_grad()
    loss, scores = torch.compile(model, fullgraph=True, backend="aot_eager")(X, labels=True)
    loss.backward()
    assert type(scores) is torch.Tensor
    torch.testing.assert_close([p.grad for p in model.parameters()], want[1])
    assert applied.calls()[0].fused == 0


@pytest.mark.parametrize(
    "hook",
    [
        lambda head: head.register_forward_hook(lambda *_: None),
        lambda head: head.register_full_backward_hook(lambda *_: None),
        lambda head: nn.modules.module.register_module_forward_hook(lambda *_: None),
    ],
    ids=["forward", "backward", "everybody's"],
)
def test_somebody_who_looks_at_the_result_gets_the_result(hook, model):
    applied = manager_of(FreeSumKernel).apply_all(model)
    handle = hook(model.head)
    try:
        assert type(step(model)[2]) is torch.Tensor
    finally:
        handle.remove()
    assert applied.calls()[0].original == 1
    assert type(step(model)[2]) is Scores


# --- counting


def test_what_was_made_real_is_counted_with_the_reason(model):
    applied = manager_of(UnscopedSumKernel).apply_all(model)
    model(X)[1].softmax(-1)
    step(model)
    (calls,) = applied.calls()
    assert (calls.fused, calls.original, calls.made_real) == (2, 0, {"softmax": 1})
    assert "made real: 1 for softmax" in str(calls)


def test_a_trial_says_what_was_made_real(model):
    applied = manager_of(UnscopedSumKernel).apply_all(model)
    tried = applied.try_(X, labels=True)
    assert not tried.not_reached
    tried.result[1].argmax(-1)
    assert applied.calls()[0].made_real == {"argmax": 1}


# --- verification


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"function": "support.heads:wrong_sum"}, "its numbers are wrong"),
        ({"lazy": heads.OtherScores, "declared": heads.OtherScores}, "its lazy result becomes something else"),
        ({"declared": None}, "it returns a Scores, which is lazy, and it was not declared"),
    ],
    ids=["the wrong sum", "the wrong scores", "undeclared"],
)
def test_both_roles_are_verified(declared, why, model):
    report = manager_of(variant_of(FreeSumKernel, **declared)).apply_all(model).report
    assert not report.fused
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.head)
    assert why in report.left_alone[0].why_not


# --- several targets


class Block(nn.Module):
    def __init__(self, second=Norm):
        super().__init__()
        self.first, self.second = Norm(8), second(8)

    def forward(self, x):
        return self.second(self.first(x) + x)


class TwoNorms(NormKernel):
    """Replaces both norms of a block, or none."""

    kernel_id = "toy_two_norms"

    def match(self, site):
        if not isinstance(site.module, Block):
            return None
        first, second = (
            replace(self.proposal(site, 8, "eps", torch.float32), target=Target(path=path))
            for path in ("first", "second")
        )
        return [heads.beside(first, second)]


class OddNorm(Norm):
    def forward(self, x):
        return super().forward(x) + 1


def test_targets_are_replaced_together():
    block = Block()
    applied = manager_of(TwoNorms).apply_all(block)
    assert {patch.path for patch in applied.patches} == {"first", "second"}
    assert [str(entry.target) for entry in applied.report.fused] == ["first.forward", "forward"]
    applied.undo()
    assert "forward" not in vars(block.first)


def test_or_not_at_all():
    block = Block(second=OddNorm)
    report = manager_of(TwoNorms).apply_all(block).report
    assert not report.fused
    assert "its second.forward, which goes with it: computes none of the known variants" in report.left_alone[0].why_not
    assert "forward" not in vars(block.first)


def test_what_is_taken_is_not_replaced_twice():
    block = Block()
    report = manager_of(TwoNorms, NormKernel).apply_all(block).report
    assert [entry.kernel_id for entry in report.fused] == ["toy_two_norms"] * 2
    assert all("fused already, together with the model" in entry.why_not for entry in report.left_alone)


# --- consent


def test_without_consent_nothing_is_replaced_and_the_report_says_how_to_give_it(model):
    report = manager_of(SumKernel).apply_all(model).report
    assert not report.fused
    assert 'allow=["lazy_scores"]' in report.left_alone[0].why_not
    assert "the scores are computed when something uses them" in report.left_alone[0].why_not
    assert report.left_alone[0].rejections[0][1].kind == "consent"


def test_with_consent_the_report_begins_with_what_is_given_up(model):
    report = manager_of(SumKernel).apply_all(model, allow=["lazy_scores"]).report
    assert str(report).startswith("as you allowed: the scores are computed when something uses them")
    assert report.to_dict()["gives_up"] == ["the scores are computed when something uses them"]
    assert type(step(model)[2]) is Scores


def test_a_missing_consent_is_no_fault_for_strict(model):
    assert not manager_of(SumKernel).plan(model, strict=True).report.fused


def test_a_kernel_that_is_asked_for_by_name_and_lacks_consent_raises(model):
    with pytest.raises(RejectedError, match="lazy_scores"):
        manager_of(SumKernel).apply("toy_sum", model)
    assert manager_of(SumKernel).apply("toy_sum", model, allow="lazy_scores").report.fused


def test_a_consent_that_nobody_asked_for_is_noted(model):
    report = manager_of(SumKernel).plan(model, allow="lazy_score").report
    assert report.notes == ["allow='lazy_score': no kernel asked for that; asked for: lazy_scores"]


# --- bad answers


def _nested(proposal):
    return heads.beside(proposal, heads.beside(proposal, proposal))


BAD = {
    "a scope that is a function": lambda p: replace(p, scope=heads.with_labels),
    "a consent that is a word": lambda p: replace(p, consent="lazy_scores"),
    "a lazy class by name": lambda p: replace(p, lazy="Scores"),
    "beside that is no proposal": lambda p: heads.beside(p, Target(path="head")),
    "beside of beside": _nested,
    "beside with a consent": lambda p: heads.beside(p, replace(p, consent=Consent("a", "b"))),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_is_a_reason(case, model):
    kernel = variant_of(FreeSumKernel, changed=lambda self, proposal: BAD[case](proposal))
    report = manager_of(kernel).apply_all(model).report
    assert not report.fused
    assert "must be" in report.raised[kernel.kernel_id]
