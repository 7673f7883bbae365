"""If a child that the kernel no longer calls gets a hook, or a forward of its own, the original runs."""

import itertools
import types
from collections import deque

import pytest
import torch
from support.attacking import attacked
from support.gated import GatedKernel
from support.kernels import ExpertsKernel, NormKernel
from support.managers import manager_of
from support.models import MLP, Experts, Norm
from support.thorough import covering
from torch import nn


def doubling(module, args, result):
    return result * 2


def doubling_with(module, args, kwargs, result):
    return result * 2


def doubling_input(module, args):
    return (args[0] * 2,)


def doubling_input_with(module, args, kwargs):
    return (args[0] * 2,), kwargs


def doubling_gradient(module, inner, outer):
    return (inner[0] * 2,)


def doubling_outer(module, outer):
    return (outer[0] * 2,)


HOOKS = {
    "forward": lambda child: child.register_forward_hook(doubling),
    "forward, always called": lambda child: child.register_forward_hook(doubling, always_call=True),
    "forward, with kwargs": lambda child: child.register_forward_hook(doubling_with, with_kwargs=True),
    "forward, first of all": lambda child: child.register_forward_hook(doubling, prepend=True),
    "pre": lambda child: child.register_forward_pre_hook(doubling_input),
    "pre, with kwargs": lambda child: child.register_forward_pre_hook(doubling_input_with, with_kwargs=True),
    "full backward": lambda child: child.register_full_backward_hook(doubling_gradient),
    "full backward pre": lambda child: child.register_full_backward_pre_hook(doubling_outer),
    "a forward of its own": lambda child: setattr(child, "forward", lambda x: x * 2),
}


class WithIdentity(MLP):
    def __init__(self):
        super().__init__()
        self.between = nn.Identity()

    def forward(self, x):
        return self.down(self.between(self.act(self.gate(x)) * self.up(x)))


class Nested(MLP):
    """A gated MLP with its activation two levels down."""

    def __init__(self):
        super().__init__(act=nn.Sequential(nn.SiLU()))

    def forward(self, x):
        return self.down(self.act[0](self.gate(x)) * self.up(x))


class NormWithIdentity(Norm):
    def __init__(self):
        super().__init__()
        self.after = nn.Identity()

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.after(self.weight * hidden_states.to(dtype))


PLACES = {
    "the activation of a gated MLP": (GatedKernel, MLP, "act"),
    "an identity in a gated MLP": (GatedKernel, WithIdentity, "between"),
    "an activation two levels down": (GatedKernel, Nested, "act.0"),
    "an identity after a norm": (NormKernel, NormWithIdentity, "after"),
    "the first of some experts": (ExpertsKernel, Experts, "experts.0"),
    "the last of some experts": (ExpertsKernel, Experts, "experts.1"),
}


def undone(child, before):
    """Remove the hooks and the forward that were put on *child* since its hooks were *before*."""
    for name, held in before.items():
        getattr(child, name).clear()
        getattr(child, name).update(held)
    child.__dict__.pop("forward", None)


@pytest.mark.parametrize("place", PLACES)
def test_every_hook_is_called_and_without_it_the_kernel_runs_again(place):
    kernel, make, path = PLACES[place]
    kept = [name for name in vars(nn.Identity()) if "hooks" in name and "dict" not in name]

    def put(hook):
        return lambda module: hook(module.get_submodule(path))

    def off(module):
        undone(module.get_submodule(path), {name: {} for name in kept})

    changes = [change for hook in HOOKS.values() for change in (put(hook), off)]
    met = attacked([kernel], make, *changes)
    computed = dict(zip(HOOKS, zip(met.answers[1::2], met.answers[2::2], strict=True), strict=True))
    assert computed == dict.fromkeys(HOOKS, ("original", "kernel")), met


@pytest.mark.parametrize("hook", ["forward", "full backward", "a forward of its own"])
def test_a_hook_that_was_there_before_is_called(hook):
    assert attacked([GatedKernel], MLP, first=lambda module: HOOKS[hook](module.act)).last == "alone"


@pytest.mark.parametrize("hook", ["forward", "pre", "a forward of its own"])
def test_a_hook_is_called_in_a_compiled_program(hook):
    attacked([GatedKernel], MLP, lambda module: HOOKS[hook](module.act), compiled=True)


class Act(nn.Module):
    """A model's own class of activations."""

    def forward(self, x):
        return nn.functional.silu(x)


def hold_own(child):
    """Leave *child* as transformers' kernelize leaves a layer for which it has no kernel."""
    child.forward = types.MethodType(type(child).forward, child)


@pytest.mark.parametrize(("make", "compiled"), covering(itertools.product([nn.SiLU, Act], [False, True])))
def test_the_forward_of_its_class_may_be_held_by_the_child_itself(make, compiled):
    def two():
        return nn.Sequential(MLP(act=make()), MLP(act=make()))

    def hold(model):
        for layer in model:
            hold_own(layer.act)

    for met in (
        attacked([GatedKernel], two, lambda model: hold_own(model[1].act), compiled=compiled),
        attacked([GatedKernel], two, first=hold, compiled=compiled),
        attacked([GatedKernel], two, lambda model: model[1].act.__dict__.pop("forward"), first=hold, compiled=compiled),
    ):
        assert (met.alone, met.reasons) == ("", ()), met
        assert compiled or set(met.answers) == {"kernel"}, met


@pytest.mark.parametrize("make", [nn.SiLU, Act])
def test_what_one_child_holds_is_not_asked_of_another(make):
    model = nn.Sequential(MLP(act=make()), MLP(act=make()))
    for layer in model:
        hold_own(layer.act)
    report = manager_of(GatedKernel).apply_all(model).report
    assert [entry.paths for entry in report.fused] == [("0",), ("1",)], report


@pytest.mark.parametrize("first", [None, lambda module: hold_own(module.act)])
@pytest.mark.parametrize(
    "forward",
    [
        lambda module: types.MethodType(nn.GELU.forward, nn.GELU("tanh")),
        lambda module: types.MethodType(lambda self, x: 2 * x, module.act),
    ],
)
def test_a_forward_of_another_module_or_function_is_called(first, forward):
    met = attacked(
        [GatedKernel],
        lambda: MLP(act=nn.GELU()),
        lambda module: setattr(module.act, "forward", forward(module)),
        first=first,
    )
    assert met.answers == ("kernel", "original")


def test_a_forward_that_replaces_the_childs_is_named():
    met = attacked([GatedKernel], MLP, lambda module: setattr(module.act, "forward", doubling))
    assert met.reasons == (
        f"no longer as it was: act is a plain SiLU, without hooks (its forward is {__name__}.doubling)",
    )


def test_a_hook_on_one_of_two_layers_leaves_the_other_fused():
    met = attacked(
        [GatedKernel], lambda: nn.Sequential(MLP(), MLP()), lambda model: model[0].act.register_forward_hook(doubling)
    )
    assert met.last == "original"
    assert len(met.reasons) == 1
    assert "act" in met.reasons[0]


def test_a_hook_on_a_child_that_the_kernel_calls_costs_nothing():
    met = attacked([GatedKernel], MLP, lambda module: module.gate.register_forward_hook(doubling))
    assert met.answers == ("kernel", "kernel")


FACTORS = deque([2.0])
"""The guard cannot compare it at each call: its contents may change while it stays the same object."""


class Asking(MLP):
    def forward(self, x):
        y = super().forward(x)
        return y if FACTORS is None else y.clone()


def scale(child):
    """Give *child* a forward of its own, as transformers' tensor parallelism does."""
    inner = child.forward

    def forward(x):
        return inner(x) * FACTORS[0]

    child.forward = forward


@pytest.fixture
def factors():
    yield FACTORS
    FACTORS[0] = 2.0


def test_what_the_forward_of_a_called_child_reads_is_its_own_affair(factors):
    met = attacked(
        [GatedKernel],
        MLP,
        lambda _: factors.__setitem__(0, 3.0),
        first=lambda module: [scale(module.gate), scale(module.down)],
    )
    assert met.answers == ("kernel", "kernel")


def test_what_it_reads_is_watched_where_the_module_reads_it_too():
    met = attacked([GatedKernel], Asking, first=lambda module: scale(module.gate))
    assert "depends on what cannot be watched: the global FACTORS" in met.alone


def test_a_hook_of_all_modules_is_called():
    handles = []

    def hook(module):
        if not handles:
            register = torch.nn.modules.module.register_module_forward_hook
            handles.append(register(lambda module, args, y: y * 2 if isinstance(module, nn.SiLU) else None))

    try:
        assert attacked([GatedKernel], MLP, hook).answers == ("kernel", "original")
    finally:
        handles[0].remove()
