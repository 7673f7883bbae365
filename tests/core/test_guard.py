"""At each call, the guard compares everything that is watched."""

import functools

import pytest
import torch
from torch import Tensor

from fuseplug import Target
from fuseplug.patching.accepts import Accepts
from fuseplug.patching.gains import DTYPES, Ends, Gains
from fuseplug.patching.guard import Guard
from fuseplug.patching.lookups import at, same_as
from fuseplug_verify import Call, Watch
from fuseplug_verify.watch import Expected, RouteStep, Term


def turn(x):
    return x


@pytest.mark.parametrize("name", ["turn", "turn_modules", "_parameters", "_buffers"])
def test_a_function_is_compared_whatever_its_name(name):
    names = {name: turn}
    call = Call(1, (), (frozenset({Tensor}),), (frozenset(),))
    accepts = Accepts((call,), 0, (0,), ((torch.float32,),), space=Expected.same(names))
    guard = Guard(call, turn, Target("forward", name), "cpu", accepts)
    assert guard.holds([torch.ones(2)])
    assert guard.why_never(None) == ""
    names[name] = lambda x: x
    assert not guard.holds([torch.ones(2)])
    assert "is no longer the one that was replaced" in guard.why_not([torch.ones(2)])


def test_a_nested_tensor_goes_to_the_original():
    call = Call(1, (), (frozenset({Tensor}),), (frozenset(),))
    guard = Guard(call, turn, Target("forward"), "cpu", Accepts((call,), 0, (0,), ((torch.float32,),)))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert type(nested) is Tensor
    assert not guard.holds([nested])
    assert "not a plain tensor" in guard.why_not([nested])


class Untouchable:
    """Refuses every lookup, because one would take longer than the rest of a declined call."""

    def __getattribute__(self, name):
        raise RuntimeError(f"{name} was looked up")


def test_a_call_that_is_too_small_looks_up_nothing_of_the_module():
    call = Call(2, (), (frozenset(), frozenset({Tensor})), (frozenset(), frozenset()))
    gains = Gains((Ends(8),) * len(DTYPES), (Ends(16),) * len(DTYPES))
    accepts = Accepts((call,), 1, (1, "weight"), ((torch.float32, torch.float32),), gains=gains)
    guard = Guard(call, turn, Target("forward"), "cpu", accepts)
    assert not guard.holds([Untouchable(), torch.ones(7, requires_grad=True)])
    assert not guard.holds([Untouchable(), torch.ones(15)])
    for large in (torch.ones(8, requires_grad=True), torch.ones(16)):
        with pytest.raises(RuntimeError, match="was looked up"):
            guard.holds([Untouchable(), large])


@pytest.mark.parametrize(("number", "whose"), [(None, ""), (0, ""), (1, " (there are some of acme)")])
def test_it_says_whose_hooks_are_on_a_child_that_is_passed_over(number, whose):
    def hook(*_):
        return None

    hook.__module__ = "acme.offload"
    module = torch.nn.Sequential(torch.nn.Sequential(torch.nn.SiLU(), torch.nn.SiLU()))
    watched = (RouteStep("0", "_modules"), RouteStep("1", "_modules"))
    call = Call(2, (), (frozenset(), frozenset({Tensor})), (frozenset(), frozenset()))
    watch = Watch((Term("bare", Expected.same(torch.nn.SiLU), watched),))
    accepts = Accepts((call,), 1, (1,), ((torch.float32,),), watch=watch)
    guard = Guard(call, torch.nn.Sequential.forward, Target("forward"), "cpu", accepts)
    if number is not None:
        module[0][number].register_forward_pre_hook(functools.partial(hook))
    expected = f"no longer as it was: 0.1 is a plain SiLU, without hooks{whose}" if whose else ""
    assert guard.why_not([module, torch.ones(2)]) == guard.why_never(module) == expected


def with_a_default(x, unsqueeze_dim=1):
    return x


def with_a_named_default(x, *, unsqueeze_dim=1):
    return x


def with_a_tensor(x, scale=torch.ones(2)):  # noqa: B008 - as third parties write it
    return x


@pytest.mark.parametrize("function", [with_a_default, with_a_named_default], ids=lambda function: function.__name__)
def test_a_function_with_defaults_is_the_same_in_a_compiled_call(function):
    same = same_as(function)
    compiled = torch.compile(lambda x: x + 1 if same(function) else x - 1, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 1


class Config:
    """Looks attributes up in its own way, as configs of transformers do."""

    size = 3

    def __getattribute__(self, name):
        return super().__getattribute__(name)


def test_an_attribute_of_what_is_no_module_is_found_in_a_compiled_call():
    module, route = torch.nn.Module(), (RouteStep("config", "plain"), RouteStep("size", "object"))
    module.config = Config()
    compiled = torch.compile(lambda x: x + at(module, route), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == at(module, route) == 3


@pytest.mark.parametrize("function", [with_a_default, with_a_tensor], ids=lambda function: function.__name__)
def test_other_defaults_make_a_function_another(function, monkeypatch):
    same = same_as(function)
    assert same(function)
    monkeypatch.setattr(function, "__defaults__", (torch.zeros(2),))
    assert not same(function)
