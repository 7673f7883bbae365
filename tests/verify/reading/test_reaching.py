"""What a reading reaches, and what it says about code that it cannot reach."""

from __future__ import annotations

import contextvars
import copy
import functools
import os
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

from fuseplug_verify.reading.findings import MISSING, Reading
from fuseplug_verify.reading.reader import read

SCALE = 2.0
FUNCTIONS = {
    "double": lambda x: 2 * x,
    "keep": lambda x: KEPT.append(x),
}
KEPT: list[object] = []


class Config:
    def __init__(self):
        self.eps, self.dropout, self.rope = 1e-5, 0.0, {"factor": 4.0}

    @property
    def alias(self):
        return self.eps


class Base(nn.Module):
    def forward(self, x):
        return self.helper(x) * self.base_scale

    def helper(self, x):
        return x * self.eps


class Module(Base):
    base_scale, shared = 1.0, 2.0

    def __init__(self):
        super().__init__()
        self.eps, self.__private = 1e-6, 5.0
        self.config = Config()
        self.weight = nn.Parameter(torch.ones(4))
        self.proj, self.act = nn.Linear(4, 4, bias=False), nn.GELU()
        self.layers = nn.ModuleList([nn.Sequential(nn.Dropout(0.1)), nn.Sequential(nn.Dropout(0.1))])
        self.mixed = nn.ModuleList([nn.Linear(4, 4), nn.SiLU()])
        self.table = {"a": nn.Tanh()}
        self.sizes = [3, 4]
        self.fn = functools.partial(scaled, factor=3.0)
        self.other = None

    def forward(self, x):
        return super().forward(x) * self.__private

    @staticmethod
    def fixed(x):
        return x * SCALE

    @classmethod
    def of_class(cls, x):
        return x * cls.shared

    @property
    def doubled(self):
        return self.eps * 2

    def calls_child(self, x):
        return self.proj(x)


def scaled(x, factor):
    return x * factor


def reading(forward, module=None) -> Reading:
    return read(forward, module or Module())


@pytest.mark.parametrize(
    ("forward", "reads"),
    [
        (lambda self, x: x * self.eps, {("eps",): 1e-6}),
        (lambda self, x: x * self.config.eps, {("config", "eps"): 1e-5}),
        (lambda self, x: x * self.config.alias, {("config", "eps"): 1e-5}),
        (lambda self, x: x * self.config.rope["factor"], {("config", "rope"): {"factor": 4.0}}),
        (lambda self, x: x * self.shared, {("shared",): 2.0}),
        (lambda self, x: x * self.doubled, {("eps",): 1e-6}),
        (lambda self, x: x * getattr(self, "eps", 1.0), {("eps",): 1e-6}),
        (lambda self, x: x * getattr(self, "gone", 1.0), {("gone",): MISSING}),
        (lambda self, x: 2 * x if hasattr(self, "gone") else x, {("gone",): MISSING}),
        (lambda self, x: x * self.sizes[0], {("sizes",): [3, 4]}),
        (lambda self, x: self.act(x), {("act", "approximate"): "none"}),
        (lambda self, x: [each(x) for each in self.layers], {("layers", "*", "*", "p"): 0.1}),
        (lambda self, x: self.layers[1](x), {("layers", "*", "*", "p"): 0.1}),
        (lambda self, x: self.calls_child(x), {("proj", "bias"): None}),
        (lambda self, x: self.of_class(x), {}),
    ],
)  # fmt: skip
def test_what_is_read(forward, reads):
    module = Module()
    found = reading(forward, module)
    assert found.unread == []
    for path, value in reads.items():
        assert path in found.reads, found.reads
        assert value is None or found.reads[path] == value


def test_super_private_names_and_inherited_methods_are_followed():
    found = reading(Module.forward)
    assert {("eps",), ("base_scale",), ("_Module__private",)} == found.reads.keys()
    assert found.methods == {((), "helper"): Base.helper}
    assert [(each.name, each.value) for each in found.globals] == [("forward", Base.forward)]
    assert Base.helper.__code__ in found.codes


def test_children_that_are_called():
    found = reading(lambda self, x: self.table["a"](self.layers[0](self.act(x))))
    # A module in a plain dict has no path below the module that holds the dict.
    assert set(found.calls) == {("act",), ("layers", "*"), ("layers", "*", "*")}


def test_children_that_are_only_looked_at_are_not_called():
    found = reading(lambda self, x: x * self.proj.weight)
    assert (list(found.calls), list(found.reads)) == ([], [("proj",), ("proj", "weight")])


def test_methods_are_those_of_the_class():
    found = reading(lambda self, x: self.fixed(x) + self.of_class(x) + self.helper(x))
    assert found.methods == {
        ((), "fixed"): Module.fixed, ((), "of_class"): Module.of_class.__func__, ((), "helper"): Base.helper
    }  # fmt: skip


def test_a_method_of_the_instance_is_read_instead():
    module = Module()
    module.helper = lambda x: KEPT.append(x)
    assert len(reading(lambda self, x: self.helper(x), module).side_effects) == 1


def test_a_forward_of_an_instance_is_read_instead():
    module = Module()
    module.proj.forward = lambda x: KEPT.append(x)
    assert [each.inside for each in reading(Module.calls_child, module).side_effects] == [("proj",)]


def test_a_forward_that_is_replaced_is_read_anew(monkeypatch):
    module = Module()
    assert reading(type(module).forward, module).side_effects == []

    def forward(self, x):
        self.eps = 2.0
        return x

    monkeypatch.setattr(Module, "forward", forward)
    assert len(reading(type(module).forward, module).side_effects) == 1


def test_globals_are_listed_once_wherever_they_are_looked_up():
    def forward(self, x):
        return self.fixed(x) * SCALE * SCALE

    found = reading(forward)
    assert [(each.name, each.value) for each in found.globals] == [("SCALE", 2.0)]
    assert found.globals[0].space is globals()


def test_globals_of_another_python_module_are_listed(tmp_path, monkeypatch):
    (tmp_path / "elsewhere_read.py").write_text("FLAG = 3\ndef helper(x):\n    return x * FLAG\n")
    monkeypatch.syspath_prepend(tmp_path)
    import elsewhere_read

    found = read(lambda x: elsewhere_read.helper(x) * elsewhere_read.FLAG)
    assert {(id(each.space), each.name) for each in found.globals if each.name != "elsewhere_read"} == {
        (id(vars(elsewhere_read)), "helper"), (id(vars(elsewhere_read)), "FLAG")
    }  # fmt: skip
    assert found.unread == []


def test_cells_are_listed():
    factor = 4.0

    def forward(self, x):
        return x * factor

    (looked,) = reading(forward).globals
    assert (looked.space, looked.name, looked.value) == (forward.__closure__[0], "factor", 4.0)


def decorated(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        KEPT.append(1)
        return function(self, *args, **kwargs)

    return wrapper


@decorated
def wrapped(self, x):
    self.eps = 3.0
    return self.proj(x)


def test_a_decorator_is_read_and_what_it_wraps():
    found = reading(wrapped)
    assert [each.text.partition(" (")[0] for each in found.side_effects] == ["KEPT.append(1)", "self.eps = 3.0"]
    assert ("proj",) in found.calls


class Registry:
    """Dispatches as libraries do, by a method of an object in a closure."""

    def __init__(self):
        self.known = {}

    def __getitem__(self, key):
        return self.known[key]

    def get_interface(self, key, default):
        return default if key == "eager" else self[key]


def dispatching(registry, function):
    @functools.wraps(function)
    def forward(self, *args, **kwargs):
        return registry.get_interface(self.implementation, function)(self, *args, **kwargs)

    return forward


@pytest.mark.parametrize(("implementation", "effects"), [("eager", []), ("keeps", ["KEPT.append(x)"])])
def test_what_a_registry_gives_for_what_the_module_says_is_read(implementation, effects):
    registry, module = Registry(), Module()
    registry.known["keeps"] = lambda self, x: KEPT.append(x)
    module.implementation = implementation
    found = reading(dispatching(registry, Module.calls_child), module)
    assert ("implementation",) in found.reads
    assert ("proj",) in found.calls
    assert [each.text.partition(" (")[0] for each in found.side_effects] == effects
    assert found.unread == []


def test_what_a_dict_gives_for_a_constant_is_read():
    assert len(reading(lambda self, x: FUNCTIONS["keep"](x)).side_effects) == 1
    assert reading(lambda self, x: FUNCTIONS["double"](x)).side_effects == []


def test_a_partial_that_is_held_is_read():
    found = reading(lambda self, x: self.fn(x))
    assert scaled.__code__ in found.codes
    assert found.unread == []


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        KEPT.append(x)
        return 2 * x * grad


squared = Squared.apply


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: Squared.apply(x),
        lambda self, x: squared(x),
    ],
)
def test_a_function_of_autograd_is_not_read(forward):
    assert "apply" in reading(forward).unread[0]


class Hidden(nn.Module):
    def __getattr__(self, name):
        raise SystemExit("this was run")

    def forward(self, x):
        return x * self.scale


class Slotted:
    __slots__ = ("scale",)


class Outside:
    """Belongs to no library; its function has no source."""


exec("def unseen(x):\n    return x", there := {"__name__": "there"})
Outside.call = there["unseen"]
VARIABLE, LOCAL, ARRAY = contextvars.ContextVar("scale", default=1.0), threading.local(), np.ones(1)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (there["unseen"], "there.unseen: there is no source"),
        (lambda self, x: Outside.call(x), "there.unseen: there is no source"),
        (lambda self, x, f: f(x), "an argument is called: f(x)"),
        (lambda self, x: getattr(self, "e" + x.name)(x), "which attribute is meant is not known"),
        (lambda self, x: self.__dict__["eps"] * x, "everything that a Module has"),
        (lambda self, x: vars(self)["eps"] * x, "builtins.vars may do more than compute"),
        (lambda self, x: torch.utils.checkpoint.checkpoint(self, x), "checkpoint may do more than compute"),
        (lambda self, x, cache: cache.refresh(x), "it is not known which refresh is called"),
        (lambda self, x: torch.distributed.all_reduce(x), "all_reduce may do more than compute"),
        (lambda self, x: torch.ops.aten.add_(x, 1), "add_ may do more than compute"),
        (lambda self, x: torch.ops.aten.add_.Tensor(x, 1), "add_.Tensor may do more than compute"),
        (lambda self, x: __import__("time").time() * x, ""),
        (lambda self, x, key: FUNCTIONS[key](x), "what is taken from a dict is not known"),
        (lambda self, x: self.mixed[0](x), "the modules of a ModuleList differ"),
        (lambda self, x: self.call(x), "may do more than compute: self.call(x)"),
        (lambda self, x: x * self.slotted.scale, "scale of a Slotted is a descriptor"),
        (lambda self, x: x * type(self).shared, "builtins.type may do more than compute"),
        (lambda self, x: x * copy.copy(self.config).eps, "copy.copy may do more than compute"),
        (lambda self, x: x * VARIABLE.get(), "what is in a ContextVar is looked at"),
        (lambda self, x: x * LOCAL.scale, "scale of a _local is answered by code of its own"),
        (lambda self, x: x * ARRAY[0], "what is in a ndarray is looked at"),
        (lambda self, x: 2 * x if "DOUBLE" in os.environ else x, "os.environ is a setting of os"),
        (lambda self, x: x * self.weight.grad, "grad is looked at"),
        (lambda self, x: x * x.untyped_storage().nbytes(), "untyped_storage may do more than compute"),
        (lambda self, x: [x * each for each in self.parameters()], "parameters of a Module is not known"),
        (lambda self, x: x * self.get_buffer("scale"), "get_buffer of a Module is not known"),
        (lambda self, x: x * self.state_dict()["scale"], "state_dict of a Module is not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_listed(forward, said):
    module = Module()
    module.call, module.slotted = types.MethodType(lambda self, x: self.proj(x), module), Slotted()
    found = reading(forward, module)
    assert any(said in each for each in found.unread) or (not said and found.side_effects), found


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x * float(self.config),
        lambda self, x: x * float(f"{self.config}"),
        lambda self, x: 2 * x if self.config else x,
        lambda self, x: x * (1.0, 2.0)[self.config],
        lambda self, x: x * len(range(self.config)),
        lambda self, x: x * sum(self.config),
        lambda self, x: -(x * -self.config),
        lambda self, x: x * abs(self.config),
        lambda self, x: x * self.config,
        lambda self, x: torch.mul(x, self.config),
    ],
)
def test_what_python_asks_an_object_of_a_models_class_is_not_read(forward):
    assert "methods of Config decide the result, and are not read" in reading(forward).unread[0]


SETTINGS = [
    lambda x: x * torch.get_num_threads(),
    lambda x: x * torch.are_deterministic_algorithms_enabled(),
    lambda x: x * len(torch.get_float32_matmul_precision()),
    lambda x: x * (torch.get_default_dtype() == x.dtype),
    lambda x: x * torch.is_inference_mode_enabled(),
    lambda x: x * torch.is_anomaly_enabled(),
    lambda x: x * torch.backends.mkldnn.deterministic,
]


@pytest.mark.parametrize("function", SETTINGS)
def test_settings_of_torch_are_not_read(function):
    (unread,) = read(function).unread
    assert "may do more than compute" in unread or "is a setting of torch" in unread


def test_code_of_a_module_that_answers_for_attributes_is_not_run():
    module = Hidden.__new__(Hidden)
    nn.Module.__init__(module)
    (unread,) = reading(Hidden.forward, module).unread
    assert "scale of a Hidden is answered by code of its own" in unread


def test_a_property_is_read_and_not_run():
    class Counting(nn.Module):
        @property
        def scale(self):
            raise SystemExit("this was run")

        def forward(self, x):
            return x * self.scale

    assert reading(Counting.forward, Counting()).unread == []


def test_recursion_is_not_followed():
    def forward(self, x, n=3):
        return forward(self, x, n - 1) if n else self.again(x)

    Recursive = type("Recursive", (nn.Module,), {"forward": forward, "again": lambda self, x: self.forward(x)})
    assert "too many calls to follow" in reading(forward, Recursive()).unread[0]


def test_a_function_alone_is_read_without_a_module():
    found = read(scaled)
    assert (found.reads, found.unread, found.codes) == ({}, [], [scaled.__code__])
