"""Meaner cases: state in every place that Python has for it, and unusual calls. The numbers stay right."""

import functools
import types

import pytest
import torch
from support.attacking import attacked, changing, fused, numbers
from support.gated import GatedKernel
from support.kernels import NormKernel
from support.models import MLP, Norm, normal
from torch import nn
from torch.nn import functional as F

HERE = globals()


def norm(finish, ready=None):
    """A class of norms with the forward *finish* and the attributes that *ready* returns."""

    class Made(Norm):
        def __init__(self):
            super().__init__()
            for name, value in (ready() if ready else {}).items():
                setattr(self, name, value)

    Made.forward = finish
    return Made


# --- where state hides


class Base(Norm):
    def forward(self, x):
        return normal(self, x)


class Derived(Base):
    def forward(self, x):
        return super().forward(x)


class DefaultNumber(Norm):
    def forward(self, x, scale=1.0):
        return normal(self, x) * scale


def helped(y, scale=1.0):
    return y * scale


def helped_by_keyword(y, *, scale=1.0):
    return y * scale


def reloaded(y):
    return y * 1.0


def reloaded_as(y):
    return y * 2.0


class Helped(Norm):
    def forward(self, x):
        return helped(normal(self, x))


class HelpedByKeyword(Norm):
    def forward(self, x):
        return helped_by_keyword(normal(self, x))


class Reloaded(Norm):
    def forward(self, x):
        return reloaded(normal(self, x))


class ReloadedItself(Norm):
    def forward(self, x):
        return normal(self, x)


def forward_as(self, x):
    return normal(self, x) * 2


RATE = [1.0]


@functools.lru_cache
def rate():
    return RATE[0]


class Remembered(Norm):
    def forward(self, x):
        return normal(self, x) * rate()


def closed():
    scale = 1.0

    class Closed(Norm):
        def forward(self, x):
            return normal(self, x) * scale

        @staticmethod
        def rebind(value):
            nonlocal scale
            scale = value

    return Closed


CLOSED = closed()
SPACE = types.SimpleNamespace(scale=1.0)
MULTIPLY = torch.mul
REGISTRY = {"silu": F.silu, "class": nn.SiLU}


class InSpace(Norm):
    def forward(self, x):
        return normal(self, x) * SPACE.scale


class ByName(Norm):
    """Calls a function of torch by a name of this Python module."""

    def forward(self, x):
        return MULTIPLY(normal(self, x), 1.0)


def in_proxy(self, x):
    return normal(self, x) * self.held["scale"]


def in_tuple(self, x):
    return normal(self, x) * self.held[0][0]


def in_dict(self, x):
    return normal(self, x) * self.held["inner"]["scale"]


def in_partial(self, x):
    return self.held(normal(self, x))


def in_length(self, x):
    return normal(self, x) * len(self.held)


def in_exception(self, x):
    try:
        return normal(self, x) * self.absent
    except AttributeError:
        return normal(self, x)


BACKING = {"scale": 1.0}


HOLDERS = {
    "a view of a dict": (
        in_proxy,
        lambda: types.MappingProxyType(BACKING),
        lambda held: BACKING.update(scale=2.0),
    ),
    "a list in a tuple": (in_tuple, lambda: ([1.0],), lambda held: held[0].__setitem__(0, 2.0)),
    "a dict in a dict": (in_dict, lambda: {"inner": {"scale": 1.0}}, lambda held: held["inner"].update(scale=2.0)),
    "keywords of a partial": (
        in_partial,
        lambda: functools.partial(helped, scale=1.0),
        lambda held: held.keywords.update(scale=2.0),
    ),
    "a length": (in_length, lambda: [1], lambda held: held.append(2)),
}


@pytest.mark.parametrize("case", HOLDERS)
def test_state_that_a_module_holds(case, monkeypatch):
    finish, ready, change = HOLDERS[case]
    monkeypatch.setitem(BACKING, "scale", 1.0)
    attacked([NormKernel], norm(finish, lambda: {"held": ready()}), lambda module: change(module.held))


def test_an_attribute_that_appears():
    attacked([NormKernel], norm(in_exception), lambda module: setattr(module, "absent", 2.0))


def defaults_of(function, value):
    return lambda patch: changing(patch, function, "__defaults__", value)


ELSEWHERE = {
    "the forward of a base class": (Derived, lambda patch: changing(patch, Base, "forward", forward_as)),
    "a default": (DefaultNumber, defaults_of(DefaultNumber.forward, (2.0,))),
    "a helper's default": (Helped, defaults_of(helped, (2.0,))),
    "a helper's default by keyword": (
        HelpedByKeyword,
        lambda patch: changing(patch, helped_by_keyword, "__kwdefaults__", {"scale": 2.0}),
    ),
    "a helper's code, loaded again": (
        Reloaded,
        lambda patch: changing(patch, reloaded, "__code__", reloaded_as.__code__),
    ),
    "its own code, loaded again": (
        ReloadedItself,
        lambda patch: changing(patch, ReloadedItself.forward, "__code__", forward_as.__code__),
    ),
    "what a function remembers": (Remembered, lambda patch: lambda _: (RATE.__setitem__(0, 2.0), rate.cache_clear())),
    "a closure": (CLOSED, lambda patch: lambda _: CLOSED.rebind(2.0)),
    "a namespace": (InSpace, lambda patch: changing(patch, SPACE, "scale", 2.0)),
    "a name for a function of torch": (
        ByName,
        lambda patch: changing(patch, HERE, "MULTIPLY", lambda y, number: y * 2),
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_state_that_is_elsewhere(case, monkeypatch):
    make, change = ELSEWHERE[case]
    attacked([NormKernel], make, change(monkeypatch))


# --- memory and gradients


def aligned(self, x):
    return normal(self, x) * (1 + (x.data_ptr() % 64 != 0))


def offset(self, x):
    return normal(self, x) * (1 + (x.storage_offset() > 0))


MEMORY = {
    "aligned": (aligned, lambda: numbers((2 * 5 * 16 + 1,))[1:].view(10, 16)),
    "offset": (offset, lambda: numbers((11, 16))[1:]),
}


@pytest.mark.parametrize("case", MEMORY)
def test_where_the_input_lies(case):
    finish, x = MEMORY[case]
    with torch.no_grad():
        attacked([NormKernel], norm(finish), given=[[x()]])


def frozen(self, x):
    return normal(self, x) * (2 if x.requires_grad and not self.weight.requires_grad else 1)


def test_whether_a_weight_is_frozen():
    attacked([NormKernel], norm(frozen), lambda module: module.weight.requires_grad_(False))


# --- chance


def by_torch(self, x):
    y = normal(self, x)
    if torch.rand(()).item() < 0.2:
        y = y * 2
    return y


def test_what_is_left_to_chance_is_left_to_chance():
    module = norm(by_torch)()
    fused(module, [NormKernel])
    norms = {round(module(numbers()).detach().norm().item(), 2) for _ in range(60)}
    assert len(norms) == 2


# --- children


class Listed(MLP):
    def __init__(self):
        super().__init__(act=nn.Sequential(nn.SiLU()))


class Registered(MLP):
    def forward(self, x):
        return self.down(REGISTRY["silu"](self.gate(x)) * self.up(x))


class RegisteredClass(MLP):
    def forward(self, x):
        return self.down(REGISTRY["class"]()(self.gate(x)) * self.up(x))


def _replaced_call(self, *args):
    return F.relu(*args)


class Own(nn.Module):
    def forward(self, x):
        return F.silu(x)


CHILDREN = {
    "one more in a sequence": (Listed, lambda patch: lambda module: module.act.append(nn.SiLU())),
    "one less in a sequence": (Listed, lambda patch: lambda module: module.act.pop(0)),
    "a registry of functions": (Registered, lambda patch: changing(patch, REGISTRY, "silu", F.gelu)),
    "a registry of classes": (RegisteredClass, lambda patch: changing(patch, REGISTRY, "class", nn.GELU)),
    "the call of a child's class": (
        lambda: MLP(act=Own()),
        lambda patch: lambda _: patch.setattr(Own, "__call__", _replaced_call, raising=False),
    ),
    "a function in a child's place": (MLP, lambda patch: lambda module: module.__dict__.update(act=F.gelu)),
    "the forward of a class of torch": (MLP, lambda patch: changing(patch, nn.SiLU, "forward", lambda self, x: x)),
}


@pytest.mark.parametrize("case", CHILDREN)
def test_children_that_are_others_later(case, monkeypatch):
    make, change = CHILDREN[case]
    attacked([GatedKernel], make, change(monkeypatch))
