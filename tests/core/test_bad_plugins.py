"""Bad kernels do nothing to a model, and the report says what is wrong with them."""

import copy
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support import bad
from support.kernels import NormAdapter, NormKernel, RotaryKernel, ran, variant_of
from support.models import GemmaNorm, Norm, Toy, inputs
from support.states import differing, state_of
from torch import nn

from fuseplug import Example, Proposal, RejectedError, Rejection, Target, VerificationError

pytestmark = pytest.mark.usefixtures("examined_once")


@pytest.fixture(autouse=True)
def _nothing_seen():
    bad._seen.clear()


def only_entry(report):
    (entry,) = report.entries
    return entry


def only_answer(report):
    """The kernel and the reason of the only rejection in a report on one module."""
    (entry,) = report.entries
    assert not entry.fused
    ((kernel_id, rejection),) = entry.rejections
    return kernel_id, rejection


# --- numbers

WRONG = {
    "zeros": "numbers are wrong.*output",
    "wrong_gradient": r"gradient of args\[0\] is off",
    "wrong_weight_gradient": "gradient of weight is off",
    "detached_weight": "gradient of weight is None",
    "writes_weight": "weight afterwards.*the original writes",
    "too_many": r"gives output\[1\], which the original does not",
    "not_a_tensor": r"gives no output\[0\]",
    "overflows": "off by inf",
    "laid_out_otherwise_without_gradients": "without gradients its output.* lies in memory",
    "wrong_when_large": "numbers are wrong",
    "stale": "numbers are wrong",
    "stale_weight": r"output\[0\] is off",
    "reused_buffer": "numbers are wrong",
}


@pytest.mark.parametrize(("function", "why"), WRONG.items())
def test_a_kernel_with_wrong_numbers_is_rejected_with_the_reason_and_the_model_left_as_it_was(manager, function, why):
    manager.register(variant_of(NormKernel, "bad", function=f"support.bad:{function}"))
    model = Norm()
    before, want = state_of(model), model(inputs())
    kernel_id, rejection = only_answer(manager.apply_all(model).report)
    assert (kernel_id, rejection.kind) == ("bad", "failed")
    assert re.search(why, rejection.reason), rejection.reason
    bad._seen.clear()
    with pytest.raises(VerificationError, match=f"bad was asked for by name, but fits nothing in Norm: .*{why}"):
        manager.apply("bad", model)
    assert not differing(before, state_of(model))
    assert torch.equal(model(inputs()), want)


def test_asked_for_by_name_a_kernel_gives_each_reason_once(manager):
    manager.register(variant_of(NormKernel, "bad", function="support.bad:raises"))
    with pytest.raises(RejectedError) as raised:
        manager.apply("bad", nn.ModuleList(Norm() for _ in range(3)))
    assert ": 0 (Norm) and 2 more: RuntimeError" in str(raised.value)
    assert str(raised.value).count("RuntimeError") == 1


def test_a_forgotten_offset_is_rejected(manager):
    manager.register(NormKernel)
    manager.register(variant_of(NormKernel, "bad", function="support.bad:without_offset", priority=1))
    (entry,) = manager.apply_all(GemmaNorm()).report.entries
    assert (entry.kernel_id, entry.variant) == ("toy_norm", "gemma")
    assert entry.rejections[0][1].kind == "failed"


@pytest.mark.parametrize("function", ["raises", "raises_when_large"])
def test_a_kernel_that_raises_is_rejected_with_what_it_said(manager, function):
    manager.register(variant_of(NormKernel, "bad", function=f"support.bad:{function}", check_sizes=(512, 4096)))
    _, rejection = only_answer(manager.apply_all(Norm()).report)
    assert rejection.kind == "error"
    assert "RuntimeError while running on cpu: " in rejection.reason
    assert "[(registered)]" in rejection.reason


@pytest.mark.parametrize("function", ["support.nowhere:f", "support.bad:nobody", "support:"])
@pytest.mark.parametrize("which", ["function", "reference"])
def test_a_function_that_is_not_there_is_a_reason(manager, which, function):
    manager.register(variant_of(NormKernel, "bad", **{which: function}))
    _, rejection = only_answer(manager.apply_all(Norm()).report)
    assert rejection.kind == "error"
    assert "Error while" in rejection.reason


def test_a_reference_that_raises_is_like_nothing(manager):
    manager.register(variant_of(NormKernel, "bad", reference="support.bad:reference_raises"))
    _, rejection = only_answer(manager.apply_all(Norm()).report)
    assert "LookupError: the reference is broken" in rejection.reason


@pytest.mark.parametrize(
    ("wide", "half", "likeliest"),
    [(1, 0.5, "llama|cast-last"), (0.5, 0.5, "llama|cast-last"), (lambda y: (y, y), 1, "llama")],
    ids=["the last variants standing", "the likeliest of all", "none"],
)
def test_the_likeliest_variant_and_how_it_differs_are_said(manager, wide, half, likeliest):
    class Changed(Norm):
        def forward(self, hidden_states):
            y, change = Norm.forward(self, hidden_states), wide if hidden_states.dtype is torch.float32 else half
            return change(y) if callable(change) else y * change

    manager.register(NormKernel)
    _, rejection = only_answer(manager.apply_all(Changed()).report)
    assert rejection.kind == "unlike"
    said = (
        rf"computes none of the known variants; of \d tried, the likeliest is ({likeliest}): "
        r"(output\[0\] differs by|gives no)"
    )
    assert re.match(said, rejection.reason), rejection.reason


# --- matching


def matching(match, kernel_id="bad"):
    return variant_of(NormKernel, kernel_id, match=match)


def proposal(**changes):
    """A right proposal for a `Norm`, except for *changes*."""

    def example(mix, size, generator):
        x = torch.randn(8, 16, generator=generator)
        return Example([x], {"weight": torch.randn(16, generator=generator)})

    fields = {"target": Target(), "adapters": (NormAdapter("llama", "eps"),), "example": example, "mixes": (None,)}
    return Proposal(**fields | changes)


def test_the_proposal_that_the_others_change_is_right(manager):
    manager.register(matching(lambda self, site: [proposal()]))
    assert manager.apply_all(Norm()).report.fused


@dataclass
class Thawed(NormAdapter.__mro__[1]):
    variant: str = "thawed"
    fields: tuple = ()

    def bind(self, compute):
        return None


@dataclass(frozen=True)
class Unbindable(NormAdapter.__mro__[1]):
    variant: str = "unbindable"

    def bind(self, compute):
        raise ValueError("not today")


@dataclass(frozen=True)
class BindsNothing(NormAdapter.__mro__[1]):
    variant: str = "nothing"

    def bind(self, compute):
        return None


@dataclass(frozen=True)
class Fickle(NormAdapter):
    """An adapter that binds three times, and then raises, when it matters."""

    bound: ClassVar[list[int]] = [0]

    def bind(self, compute):
        self.bound[0] += 1
        if self.bound[0] > 3:
            raise ValueError("not this time")
        return super().bind(compute)


def raising(self, site):
    raise ZeroDivisionError("in match")


def example_raises(mix, size, generator):
    raise ZeroDivisionError("in example")


NONSENSE = {
    "raises": raising,
    "a number": lambda self, site: 3,
    "a string": lambda self, site: "yes",
    "true": lambda self, site: True,
    "a proposal, not a list": lambda self, site: proposal(),
    "strings": lambda self, site: ["yes"],
    "a class": lambda self, site: [Proposal],
    "a list in a list": lambda self, site: [[]],
    "a rejection in a list": lambda self, site: [Rejection("not this one")],
    "some good and some bad": lambda self, site: [proposal(), None],
    "a generator that raises": lambda self, site: (1 / 0 for _ in range(3)),
    "no reason": lambda self, site: Rejection(None),
    "target is a string": lambda self, site: [proposal(target="forward")],
    "target of no name": lambda self, site: [proposal(target=Target(None))],
    "no such method": lambda self, site: [proposal(target=Target("backward"))],
    "no such function": lambda self, site: [proposal(target=Target("forward", "apply_nothing"))],
    "no adapters": lambda self, site: [proposal(adapters=())],
    "adapters are strings": lambda self, site: [proposal(adapters=("llama",))],
    "adapters is none": lambda self, site: [proposal(adapters=None)],
    "adapter not hashable": lambda self, site: [proposal(adapters=(Thawed(),))],
    "adapter raises": lambda self, site: [proposal(adapters=(Unbindable(),))],
    "adapter binds nothing": lambda self, site: [proposal(adapters=(BindsNothing(),))],
    "no mixes": lambda self, site: [proposal(mixes=())],
    "mixes not hashable": lambda self, site: [proposal(mixes=([1],))],
    "covers a number": lambda self, site: [proposal(covers=(1,))],
    "covers a string": lambda self, site: [proposal(covers="experts")],
    "covers none": lambda self, site: [proposal(covers=None)],
    "roundings": lambda self, site: [proposal(roundings="many")],
    "working roundings": lambda self, site: [proposal(working_roundings="many")],
    "example raises": lambda self, site: [proposal(example=example_raises)],
    "example is none": lambda self, site: [proposal(example=None)],
    "example gives none": lambda self, site: [proposal(example=lambda *args: None)],
    "example without inputs": lambda self, site: [proposal(example=lambda *args: Example([]))],
    "example without tensors": lambda self, site: [proposal(example=lambda *args: Example([1]))],
    "example of strange parameters": lambda self, site: [
        proposal(example=lambda *args: Example([torch.ones(1, 16)], {"weight": 1}))
    ],
    "example takes nothing": lambda self, site: [proposal(example=lambda: None)],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_hinders_nobody_else_and_is_answered(manager, name):
    manager.register(matching(NONSENSE[name]))
    model = Norm()
    before, alone = state_of(model), manager.apply_all(model).report
    reason = alone.raised.get("bad") or only_answer(alone)[1].reason
    assert reason
    assert not differing(before, state_of(model))
    with pytest.raises(RejectedError, match="bad was asked for by name") as caught:
        manager.apply("bad", model)
    assert reason in str(caught.value)
    manager.register(NormKernel)
    report = manager.apply_all(model).report
    assert [entry.kernel_id for entry in report.fused] == ["toy_norm"]
    said = {kernel for entry in report.entries for kernel, _ in entry.rejections}
    assert said & {"bad", "fuseplug"} or any(entry.covered_by for entry in report.entries)
    assert str(report)


@pytest.mark.parametrize("answer", [None, [], (), iter(())])
def test_nothing_to_say_is_no_entry(manager, answer):
    manager.register(matching(lambda self, site: answer))
    assert not manager.apply_all(Norm()).report.entries


def test_an_adapter_that_raises_when_it_matters_is_a_reason(manager):
    Fickle.bound[0] = 0
    manager.register(matching(lambda self, site: [proposal(adapters=(Fickle("llama", "eps"),))]))
    found = [manager.apply_all(Norm()).report.entries[0] for _ in range(4)]
    assert not found[-1].fused


def test_an_error_names_the_place_in_the_plugins_own_file(manager):
    manager.register(matching(raising))
    reason = manager.apply_all(Norm()).report.raised["bad"]
    assert "ZeroDivisionError while matching: in match" in reason
    assert f"{__file__}:{raising.__code__.co_firstlineno + 1}" in reason


def test_a_match_that_raises_everywhere_is_one_row_and_no_target(manager, model):
    manager.register(matching(raising))
    manager.register(NormKernel)
    applied = manager.apply_all(model)
    report, count = applied.report, sum(1 for _ in model.modules())
    assert report.summary().startswith("Toy: 5 of 5 targets fused for training on cpu; ")
    assert report.raised["bad"].startswith(f"asked about the model and {count - 1} more: ZeroDivisionError")
    _, _, rest = str(report).partition("kernels not taking part")
    assert str(report).count("in match") == rest.count("in match") == 1
    assert "broken" in rest
    assert manager.plan(model).explain("norm").count("in match") == 1
    applied.undo()
    with pytest.raises(RejectedError, match="strict=True, and bad raised an error, asked about the model and"):
        manager.apply_all(model, strict=True)


def test_what_else_it_answered_stands(manager, model):
    def picky(self, site):
        return raising(self, site) if hasattr(site.module, "gate") else NormKernel.match(self, site)

    manager.register(matching(picky))
    report = manager.apply_all(model).report
    assert {entry.kernel_id for entry in report.entries} == {"bad"}
    assert len(report.fused) == 5
    assert report.raised["bad"].startswith("asked about layers.0.mlp and 1 more: ZeroDivisionError")


class Stop(BaseException):
    """An exception that no ``except Exception`` catches."""


def stopping_kernel(where, error):
    def stopping(*args):
        raise error

    changed = {
        "match": matching(stopping),
        "example": matching(lambda self, site: [proposal(example=stopping)]),
        "unavailable": variant_of(NormKernel, "bad", unavailable=stopping),
        "unsupported": variant_of(NormKernel, "bad", unsupported=stopping),
        "propose": matching(lambda self, site: (stopping() for _ in range(2))),
        "bind": matching(lambda self, site: [proposal(adapters=(Stopping("stops", error),))]),
    }
    return changed[where]


@dataclass(frozen=True)
class Stopping(NormAdapter.__mro__[1]):
    variant: str
    error: type

    def bind(self, compute):
        raise self.error


STOPS = ["match", "example", "unavailable", "unsupported", "propose", "bind"]


@pytest.mark.parametrize("where", STOPS)
def test_ctrl_c_passes_through(manager, model, where):
    manager.register(stopping_kernel(where, KeyboardInterrupt))
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        manager.apply_all(model)
    assert not differing(before, state_of(model))


@pytest.mark.parametrize("where", STOPS)
@pytest.mark.parametrize("error", [SystemExit, Stop])
def test_a_kernel_that_would_end_the_program_is_an_answer(manager, model, where, error):
    manager.register(stopping_kernel(where, error))
    manager.register(RotaryKernel)
    report = manager.apply_all(model).report
    assert {entry.kernel_id for entry in report.fused} == {"toy_rotary"}
    reasons = [r.reason for entry in report.left_alone for k, r in entry.rejections if k == "bad"]
    reasons += report.raised.values()
    assert reasons
    assert all(error.__name__ in reason for reason in reasons)


@pytest.mark.parametrize("said", [ValueError("who knows"), 3])
def test_an_availability_check_gone_wrong_is_a_reason(manager, said):
    def unavailable(self, kind):
        if isinstance(said, Exception):
            raise said
        return said

    manager.register(variant_of(NormKernel, "bad", unavailable=unavailable))
    report = manager.apply_all(Norm()).report
    assert only_answer(report)[1].kind == "unavailable"
    assert str(report)


@pytest.mark.parametrize("said", [ValueError("who knows"), "no instruction for it"])
def test_a_variant_that_a_kernel_declines_goes_to_the_next_one(manager, said):
    asked = []

    def unsupported(self, adapter):
        asked.append(adapter.variant)
        if isinstance(said, Exception):
            raise said
        return said

    manager.register(variant_of(NormKernel, "picky", unsupported=unsupported, priority=1))
    entry = only_entry(manager.apply_all(Norm()).report)
    ((_, rejection),) = entry.rejections
    assert (rejection.kind, entry.kernel_id) == ("unsupported", None)
    assert str(said) in rejection.reason
    assert asked
    assert f"it computes {asked[0]}" in rejection.reason
    manager.register(variant_of(NormKernel, "modest"))
    entry = only_entry(manager.apply_all(Norm()).report)
    assert (entry.kernel_id, [who for who, _ in entry.rejections]) == ("modest", ["picky"])


# --- plugins that change the modules they are asked about


def zeroed(module):
    with torch.no_grad():
        module.weight.zero_()


MUTATIONS = {
    "sets": lambda module: setattr(module, "seen", True),
    "changes an attribute": lambda module: setattr(module, "eps", 1.0),
    "deletes an attribute": lambda module: delattr(module, "eps"),
    "deletes a parameter": lambda module: delattr(module, "weight"),
    "replaces a parameter": lambda module: setattr(module, "weight", nn.Parameter(torch.zeros(3))),
    "writes": zeroed,
    "writes data": lambda module: setattr(module.weight, "data", torch.zeros(3, device="meta")),
    "freezes": lambda module: module.weight.requires_grad_(False),
    "switches": lambda module: module.train(not module.training),
    "adds a child": lambda module: module.add_module("child", nn.Linear(1, 1)),
    "patches": lambda module: setattr(module, "forward", lambda x: x),
}
mutating_in_every_way = pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=list(MUTATIONS))


def mutating(mutate, only=Norm):
    def match(self, site):
        if isinstance(site.module, only):
            mutate(site.module)
        return NormKernel.match(self, site)

    return variant_of(NormKernel, "bad", match=match, priority=1)


@mutating_in_every_way
def test_who_changes_what_it_is_shown_is_rejected_by_name_and_the_model_untouched(manager, model, mutate):
    manager.register(mutating(mutate))
    manager.register(NormKernel)
    before = state_of(model)
    values = copy.deepcopy(model.state_dict())
    report = manager.plan(model).report
    assert {entry.kernel_id for entry in report.entries} == {"toy_norm"}
    for entry in report.entries:
        ((kernel, rejection),) = entry.rejections
        assert (kernel, rejection.kind) == ("bad", "error")
        assert "it changed the module it was asked about" in rejection.reason
        assert "[(registered)]" in rejection.reason
    assert not differing(before, state_of(model))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())


@mutating_in_every_way
def test_what_it_did_to_children_is_seen_by_nobody_else(manager, model, mutate):
    def through_the_parent(module):
        for child in module.modules():
            if isinstance(child, Norm):
                mutate(child)

    manager.register(mutating(through_the_parent, Toy))
    manager.register(NormKernel)
    report = manager.plan(model).report
    assert report.raised["bad"].startswith("asked about the model: it changed the module it was asked about")
    assert {entry.kernel_id for entry in report.entries} == {"bad"}


class Helped(nn.Module):
    """A module whose forward calls a method that is a target itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6

    def normed(self, hidden_states):
        return Norm.forward(self, hidden_states)

    def forward(self, x):
        return self.normed(x) * 2


def test_a_method_of_another_name_is_fused_again_and_again_and_undone(manager):
    def match(self, site):
        found = NormKernel.match(self, site)
        return found and [Proposal(Target("normed"), p.adapters, p.example, p.mixes) for p in found]

    manager.register(matching(match, "helper"))
    model = nn.Sequential(Helped(), Helped())
    before, want = state_of(model), model(inputs())
    first = manager.apply_all(model)
    now = state_of(model)
    second = manager.apply_all(model)
    assert len(first.report.fused) == len(second.report.fused) == 2
    assert not differing(now, state_of(model))
    ran.clear()
    torch.testing.assert_close(model(inputs()), want)
    assert ran["norm"] == 2
    second.undo()
    assert not differing(before, state_of(model))
