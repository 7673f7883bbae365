"""Meaner cases: state in every place that Python has for it, and unusual calls. The numbers stay right."""

import argparse
import collections
import contextvars
import copy
import functools
import os
import random
import threading
import types

import numpy as np
import pytest
import torch
from support.attacking import attacked, changing, numbers
from support.gated import GatedKernel
from support.kernels import NormKernel
from support.models import MLP, Norm
from torch import nn
from torch.nn import functional as F

HERE = globals()


def normal(self, x):
    wide = x.to(torch.float32)
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def norm(finish, ready=None):
    """A norm that does *finish* to its result, and has what *ready* gives it."""

    class Made(Norm):
        def __init__(self):
            super().__init__()
            for name, value in (ready() if ready else {}).items():
                setattr(self, name, value)

    Made.forward = finish
    return Made


# --- where state hides


class Meta(type):
    scale = 1.0


class ByMetaclass(Norm, metaclass=Meta):
    def forward(self, x):
        return normal(self, x) * type(self).scale


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


class Settings:
    def __init__(self):
        self.scale = 1.0


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
VARIABLE = contextvars.ContextVar("scale", default=1.0)
LOCAL = threading.local()
LOCAL.scale = 1.0
SPACE = types.SimpleNamespace(scale=1.0)
ARGUMENTS = argparse.Namespace(scale=1.0)
ARRAY = np.ones(1)
NESTED = ([1.0],)
MULTIPLY = torch.mul
REGISTRY = {"silu": F.silu, "class": nn.SiLU}


class InContext(Norm):
    def forward(self, x):
        return normal(self, x) * VARIABLE.get()


class InThread(Norm):
    def forward(self, x):
        return normal(self, x) * LOCAL.scale


class InSpace(Norm):
    def forward(self, x):
        return normal(self, x) * SPACE.scale


class InArguments(Norm):
    def forward(self, x):
        return normal(self, x) * ARGUMENTS.scale


class InArray(Norm):
    def forward(self, x):
        return normal(self, x) * float(ARRAY[0])


class InTuple(Norm):
    def forward(self, x):
        return normal(self, x) * NESTED[0][0]


class InEnvironment(Norm):
    def forward(self, x):
        return normal(self, x) * float(os.environ["FUSEPLUG_TEST_SCALE"])


class InEnvironmentOrNot(Norm):
    def forward(self, x):
        y = normal(self, x)
        return y * 2 if "FUSEPLUG_TEST_DOUBLE" in os.environ else y


class ByName(Norm):
    """A function of torch, under a name of this Python module."""

    def forward(self, x):
        return MULTIPLY(normal(self, x), 1.0)


class Knob:
    """An object whose value shows in everything that Python does with it."""

    def __init__(self):
        self.value = 1.0

    def __float__(self):
        return self.value

    def __str__(self):
        return str(self.value)

    def __bool__(self):
        return self.value > 1

    def __index__(self):
        return int(self.value)

    def __iter__(self):
        yield self.value

    def __neg__(self):
        return -self.value

    def __abs__(self):
        return self.value

    def __mul__(self, other):
        return other * self.value

    __rmul__ = __mul__


def as_float(self, x):
    return normal(self, x) * float(self.knob)


def as_text(self, x):
    return normal(self, x) * float(str(self.knob))


def as_formatted_text(self, x):
    return normal(self, x) * float(f"{self.knob}")


def as_condition(self, x):
    y = normal(self, x)
    if self.knob:
        y = y * 2
    return y


def as_index(self, x):
    return normal(self, x) * (1.0, 1.0, 2.0)[self.knob]


def as_range(self, x):
    return normal(self, x) * len(range(self.knob))


def as_sum(self, x):
    return normal(self, x) * sum(self.knob)


def as_negative(self, x):
    return -(normal(self, x) * -self.knob)


def as_absolute(self, x):
    return normal(self, x) * abs(self.knob)


def as_factor(self, x):
    return normal(self, x) * self.knob


def as_tensor(self, x):
    return normal(self, x) * torch.tensor(float(self.knob))


PROTOCOLS = {name: each for name, each in HERE.items() if name.startswith("as_")}


def in_deque(self, x):
    return normal(self, x) * self.held[-1]


def in_array(self, x):
    return normal(self, x) * float(self.held[0])


def in_proxy(self, x):
    return normal(self, x) * self.held["scale"]


def in_tuple(self, x):
    return normal(self, x) * self.held[0][0]


def in_dict(self, x):
    return normal(self, x) * self.held["inner"]["scale"]


def in_copy(self, x):
    return normal(self, x) * copy.copy(self.held).scale


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
    "a deque": (in_deque, lambda: collections.deque([1.0]), lambda held: held.append(2.0)),
    "an array of numpy": (in_array, lambda: np.ones(1), lambda held: held.fill(2.0)),
    "a view of a dict": (
        in_proxy,
        lambda: types.MappingProxyType(BACKING),
        lambda held: BACKING.update(scale=2.0),
    ),
    "a list in a tuple": (in_tuple, lambda: ([1.0],), lambda held: held[0].__setitem__(0, 2.0)),
    "a dict in a dict": (in_dict, lambda: {"inner": {"scale": 1.0}}, lambda held: held["inner"].update(scale=2.0)),
    "a copy of an object": (in_copy, Settings, lambda held: setattr(held, "scale", 2.0)),
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


@pytest.mark.parametrize("case", PROTOCOLS)
def test_an_object_that_python_asks(case):
    make = norm(PROTOCOLS[case], lambda: {"knob": Knob()})
    attacked([NormKernel], make, lambda module: setattr(module.knob, "value", 2.0))


def test_an_attribute_that_appears():
    attacked([NormKernel], norm(in_exception), lambda module: setattr(module, "absent", 2.0))


def defaults_of(function, value):
    return lambda patch: changing(patch, function, "__defaults__", value)


ELSEWHERE = {
    "a metaclass": (ByMetaclass, lambda patch: changing(patch, Meta, "scale", 2.0)),
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
    "a context variable": (InContext, lambda patch: lambda _: VARIABLE.set(2.0)),
    "a thread's own": (InThread, lambda patch: changing(patch, LOCAL, "scale", 2.0)),
    "a namespace": (InSpace, lambda patch: changing(patch, SPACE, "scale", 2.0)),
    "parsed arguments": (InArguments, lambda patch: changing(patch, ARGUMENTS, "scale", 2.0)),
    "an array": (InArray, lambda patch: lambda _: ARRAY.fill(2.0)),
    "a list in a tuple": (InTuple, lambda patch: lambda _: NESTED[0].__setitem__(0, 2.0)),
    "the environment": (InEnvironment, lambda patch: lambda _: patch.setenv("FUSEPLUG_TEST_SCALE", "2.0")),
    "whether the environment has": (
        InEnvironmentOrNot,
        lambda patch: lambda _: patch.setenv("FUSEPLUG_TEST_DOUBLE", "1"),
    ),
    "a name for a function of torch": (
        ByName,
        lambda patch: changing(patch, HERE, "MULTIPLY", lambda y, number: y * 2),
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_state_that_is_elsewhere(case, monkeypatch):
    make, change = ELSEWHERE[case]
    monkeypatch.setitem(os.environ, "FUSEPLUG_TEST_SCALE", "1.0")
    attacked([NormKernel], make, change(monkeypatch))


# --- settings of torch


def threads(self, x):
    return normal(self, x) * (1 + (torch.get_num_threads() > 1))


def deterministic(self, x):
    return normal(self, x) * (1 + torch.are_deterministic_algorithms_enabled())


def precise(self, x):
    return normal(self, x) * (1 + (torch.get_float32_matmul_precision() != "highest"))


def default_dtype(self, x):
    return normal(self, x) * (1 + (torch.get_default_dtype() == torch.float64))


def mkldnn(self, x):
    return normal(self, x) * (1 + torch.backends.mkldnn.deterministic)


SETTINGS = {
    "threads": (threads, lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)),
    "deterministic": (
        deterministic,
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "precision": (
        precise,
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "default dtype": (
        default_dtype,
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "mkldnn": (
        mkldnn,
        lambda: setattr(torch.backends.mkldnn, "deterministic", True),
        lambda: setattr(torch.backends.mkldnn, "deterministic", False),
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_of_torch(case):
    finish, change, back = SETTINGS[case]
    try:
        attacked([NormKernel], norm(finish), lambda _: change())
    finally:
        back()


def inference(self, x):
    return normal(self, x) * (1 + torch.is_inference_mode_enabled())


def test_a_question_for_inference_mode():
    attacked([NormKernel], norm(inference), around=torch.inference_mode)


def test_a_question_for_anomaly_mode():
    def anomalous(self, x):
        return normal(self, x) * (1 + torch.is_anomaly_enabled())

    with pytest.warns(UserWarning, match="Anomaly"):
        attacked([NormKernel], norm(anomalous), around=torch.autograd.detect_anomaly)


# --- numbers that no example has


def beyond(self, x):
    return normal(self, x) + F.relu(x - 1e9)


def softly(self, x):
    return normal(self, x) + torch.tanh(F.softplus(x.double() - 1e9)).to(x.dtype)


def zeros(self, x):
    return normal(self, torch.where(x == 0, torch.ones_like(x), x))


def masked_zeros(self, x):
    return normal(self, x.masked_fill(x == 0, 1.0))


def tiny(self, x):
    return normal(self, torch.where(x.abs() < 1e-20, torch.ones_like(x), x))


def nothing_at_all(self, x):
    y = normal(self, x)
    if not x.any():
        y = y + 1
    return y


def negative_zero(self, x):
    return normal(self, x) + torch.signbit(x) * (x == 0)


def some(value):
    x = numbers((5, 16))
    x[0, :4] = value
    return x


VALUES = {
    "beyond a number": (beyond, numbers((5, 16), scale=1e10)),
    "softly beyond a number": (softly, numbers((5, 16), scale=1e10)),
    "zeros": (zeros, some(0.0)),
    "masked zeros": (masked_zeros, some(0.0)),
    "tiny numbers": (tiny, some(1e-25)),
    "nothing but zeros": (nothing_at_all, torch.zeros(5, 16)),
    "negative zeros": (negative_zero, some(-0.0)),
}


@pytest.mark.parametrize("case", VALUES)
def test_numbers_that_no_example_has(case):
    finish, x = VALUES[case]
    attacked([NormKernel], norm(finish), given=[[x]])


# --- shapes, memory and gradients


def divided(self, x):
    return normal(self, x) * (1 + x.shape[-2] // 1000)


def looked_up(self, x):
    return normal(self, x) * {1001: 2.0}.get(x.shape[-2], 1.0)


def repeated(self, x):
    y = normal(self, x)
    for _ in range(x.shape[-2] // 900):
        y = y * 2
    return y


LENGTHS = {name: HERE[name] for name in ("divided", "looked_up", "repeated")}


@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_that_no_example_has(case):
    attacked([NormKernel], norm(LENGTHS[case]), given=[[numbers((1001, 16))]])


def aligned(self, x):
    return normal(self, x) * (1 + (x.data_ptr() % 64 != 0))


def offset(self, x):
    return normal(self, x) * (1 + (x.storage_offset() > 0))


def stored(self, x):
    return normal(self, x) * (1 + (x.untyped_storage().nbytes() > 100000))


MEMORY = {
    "aligned": (aligned, lambda: numbers((2 * 5 * 16 + 1,))[1:].view(10, 16)),
    "offset": (offset, lambda: numbers((11, 16))[1:]),
    "stored": (stored, lambda: numbers((3000, 16))[:5]),
}


@pytest.mark.parametrize("case", MEMORY)
def test_where_the_input_lies(case):
    finish, x = MEMORY[case]
    with torch.no_grad():
        attacked([NormKernel], norm(finish), given=[[x()]])


def accumulated(self, x):
    return normal(self, x) * (1 + (self.weight.grad is not None))


def frozen(self, x):
    return normal(self, x) * (2 if x.requires_grad and not self.weight.requires_grad else 1)


WEIGHTS = {
    "a gradient that it has": (accumulated, lambda module: setattr(module.weight, "grad", torch.ones(16))),
    "a frozen weight": (frozen, lambda module: module.weight.requires_grad_(False)),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_what_a_weight_tells(case):
    finish, change = WEIGHTS[case]
    attacked([NormKernel], norm(finish), change)


# --- chance


def by_python(self, x):
    y = normal(self, x)
    if random.random() < 0.2:
        y = y * 2
    return y


def by_torch(self, x):
    y = normal(self, x)
    if torch.rand(()).item() < 0.2:
        y = y * 2
    return y


def by_numpy(self, x):
    y = normal(self, x)
    if np.random.rand() < 0.2:
        y = y * 2
    return y


@pytest.mark.parametrize("draw", [by_python, by_torch, by_numpy])
def test_what_is_left_to_chance_is_left_to_chance(draw):
    module = norm(draw)()
    from support.attacking import fused

    fused(module, [NormKernel])
    norms = {round(module(numbers()).detach().norm().item(), 2) for _ in range(60)}
    assert len(norms) == 2


# --- what is below


def all_parameters(self, x):
    y = normal(self, x)
    for parameter in self.parameters():
        y = y * parameter.dim()
    return y


def asked_buffer(self, x):
    return normal(self, x) * self.get_buffer("scale")


def asked_state(self, x):
    return normal(self, x) * self.state_dict()["scale"]


BELOW = {
    "all parameters": (all_parameters, lambda module: module.register_parameter("b", nn.Parameter(torch.ones(2, 2)))),
    "a buffer by its name": (asked_buffer, lambda module: module.scale.fill_(2.0)),
    "a state dict": (asked_state, lambda module: module.scale.fill_(2.0)),
}


@pytest.mark.parametrize("case", BELOW)
def test_what_is_asked_of_the_module(case):
    finish, change = BELOW[case]

    class Made(norm(finish)):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

    Made.forward = finish
    attacked([NormKernel], Made, change)


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
