"""Functions that a registry has for a name: the guard watches the entries, whoever gives the name."""

import functools

import pytest
import torch
from support.attacking import attacked, changing, numbers
from support.convolutions import ConvKernel
from support.kernels import variant_of
from survey.single_class import Class, instance
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

FUNCTIONS = {"silu": F.silu, "gelu": F.gelu}
MADE = {"silu": (nn.SiLU, {}), "gelu": (nn.GELU, {"approximate": "none"})}
KEPT = []
PARTIALS = {"silu": functools.partial(F.silu, inplace=False)}


class Keeping(dict):
    def __getitem__(self, name):
        KEPT.append(name)
        return super().__getitem__(name)


KEEPING = Keeping(FUNCTIONS)


def convolved(x, weight, bias):
    return F.conv1d(x, weight[:, None], bias, padding=weight.shape[-1] - 1, groups=len(weight))[..., : x.shape[-1]]


def by_transformers(x, weight, bias=None, activation=None):
    y = convolved(x, weight, bias)
    return y if activation is None else ACT2FN[activation](y)


def by_function(x, weight, bias=None, activation=None):
    y = convolved(x, weight, bias)
    return FUNCTIONS[activation](y) if activation else y


def by_get(x, weight, bias=None, activation=None, **kwargs):
    return FUNCTIONS.get(activation, F.relu)(convolved(x, weight, bias))


def by_tuple(x, weight, bias=None, activation="silu"):
    cls, options = MADE[activation]
    return cls(**options)(convolved(x, weight, bias))


def by_partial(x, weight, bias=None, activation="silu"):
    return PARTIALS[activation](convolved(x, weight, bias))


def wrapping(function):
    taken = ("x", "weight", "bias", "activation")

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        kwargs = {name: value for name, value in kwargs.items() if name in taken}
        return function(*args, **kwargs)

    return wrapped


by_wrapped = wrapping(by_transformers)


def renaming(change):
    """Wrap `by_transformers` so that *change* decides which activation it is asked for."""

    @functools.wraps(by_transformers)
    def wrapped(*args, **kwargs):
        change(kwargs)
        return by_transformers(*args, **kwargs)

    return wrapped


@functools.wraps(by_transformers)
def renamed_there(*args, **kwargs):
    options = kwargs
    options["activation"] = "tanh"
    return by_transformers(*args, **kwargs)


@functools.wraps(by_transformers)
def renamed_by_pop(*args, **kwargs):
    kwargs.pop("activation")
    return by_transformers(*args, **kwargs)


renamed_elsewhere = renaming(lambda options: options.update(activation="tanh"))


def by_another_name(x, weight, bias=None, activation=None):
    return ACT2FN[activation.lower()](convolved(x, weight, bias))


def by_keeping(x, weight, bias=None, activation=None):
    return KEEPING[activation](convolved(x, weight, bias))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(numbers((8, 4), seed=1)), nn.Parameter(numbers((8,), seed=2))
        self.activation = "silu"


class Positional(Conv):
    def forward(self, x):
        return causal(x, self.weight, self.bias, self.activation)


class Keyword(Conv):
    def forward(self, x):
        return causal(x, self.weight, self.bias, activation=self.activation)


def causal(x, weight, bias=None, activation=None):
    raise NotImplementedError("a test puts a function here")


READ = (by_transformers, by_function, by_get, by_wrapped)


def kernel(keyword, *names):
    return variant_of(ConvKernel, target="causal", keyword=keyword, names=names or ("silu",))


def met(monkeypatch, function, *changes, keyword=True, names=(), **more):
    monkeypatch.setitem(globals(), "causal", function)
    make = Keyword if keyword else Positional
    return attacked([kernel(keyword, *names)], make, *changes, given=[[numbers((2, 8, 12))]], **more)


def called(name):
    def change(module):
        module.activation = name

    return change


@pytest.mark.parametrize("keyword", [True, False])
@pytest.mark.parametrize("function", READ, ids=lambda function: function.__name__)
def test_a_function_that_an_argument_names_is_fused_and_another_name_is_the_originals(monkeypatch, function, keyword):
    found = met(monkeypatch, function, called("gelu"), called("silu"), keyword=keyword)
    assert found.answers == ("kernel", "original", "kernel"), found


@pytest.mark.parametrize(
    ("function", "registry", "entry"),
    [
        (by_transformers, ACT2FN, nn.Tanh),
        (by_wrapped, ACT2FN, (nn.Hardtanh, {"max_val": 0.5})),
        (by_function, FUNCTIONS, torch.tanh),
        (by_get, FUNCTIONS, torch.tanh),
    ],
)
def test_an_entry_that_is_replaced_is_what_computes(monkeypatch, function, registry, entry):
    another = changing(monkeypatch, registry, "gelu", entry)
    found = met(monkeypatch, function, another, changing(monkeypatch, registry, "silu", entry))
    assert found.answers == ("kernel", "kernel", "original"), found


def test_what_a_registry_does_with_a_name_is_watched(monkeypatch):
    def change(_):
        monkeypatch.setattr(type(ACT2FN), "__getitem__", lambda self, name: torch.tanh)

    assert met(monkeypatch, by_transformers, change).answers == ("kernel", "original")


def test_of_several_names_each_is_watched(monkeypatch):
    names = ("silu", "gelu", None)
    changes = (called("gelu"), called(None), called("relu"), called("silu"))
    found = met(monkeypatch, by_transformers, *changes, names=names)
    assert found.answers == ("kernel", "kernel", "kernel", "original", "kernel"), found
    replaced = changing(monkeypatch, ACT2FN, "gelu", nn.Tanh)
    found = met(monkeypatch, by_transformers, replaced, called("gelu"), names=names)
    assert found.answers == ("kernel", "original", "original"), found


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (by_another_name, "cannot be read"),
        (by_keeping, "does more than compute"),
        (by_tuple, "the arguments that ** passes on are not known"),
        (by_partial, "a partial that may change"),
        (renamed_there, "cannot be read"),
        (renamed_elsewhere, "cannot be read"),
        (renamed_by_pop, "cannot be read"),
    ],
)
def test_what_cannot_be_followed_or_watched_is_left_alone(monkeypatch, function, why):
    found = met(monkeypatch, function)
    assert found.last == "alone"
    assert why in found.alone


@pytest.mark.parametrize(
    ("folder", "name", "bias", "names"),
    [
        ("mamba", "MambaMixer", True, ("silu",)),
        ("mamba2", "Mamba2Mixer", True, ("silu",)),
        ("qwen3_next", "Qwen3NextGatedDeltaNet", False, ("silu",)),
        ("lfm2", "Lfm2ShortConv", False, ()),
    ],
)
def test_the_convolutions_of_transformers_are_fused(folder, name, bias, names):
    made = functools.partial(instance, Class("", folder, name))
    width = next(child for name, child in made().named_children() if name.startswith("in_proj")).in_features
    chosen = variant_of(ConvKernel, bias=bias, names=names)
    found = attacked([chosen], made, called("gelu"), given=[[numbers((2, 6, width))]], share=1e-3)
    assert found.answers == ("kernel", "original" if names else "kernel"), found
