"""`hazard` says what may be called to find out what it is, and `remembered` asks about each function once."""

import functools
import gc
import os
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuseplug_verify import hazard, remembered

SEEN = []


def name(value):
    """A test id without an address in it, so that it is the same in every process."""
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


def computes(x):
    return F.silu(x) * 2


def notes(x):
    SEEN.append(x)
    return x


class Computes(nn.Module):
    def forward(self, x):
        return computes(x)

    def method(self, x):
        return self(x)


class Counts(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x


class CalledOtherwise(Computes):
    def __call__(self, x):
        SEEN.append(x)
        return x


class Callable:
    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    "called",
    [computes, F.gelu, torch.sigmoid, nn.SiLU(), Computes(), Computes().method, functools.partial(computes, 1)],
    ids=name,
)
def test_what_only_computes_may_be_called(called):
    assert hazard(called) == ""


@pytest.mark.parametrize(
    ("called", "why"),
    [
        (notes, "it does more than compute: SEEN.append(x)"),
        (functools.partial(notes), "it does more than compute"),
        (Counts(), "it does more than compute: self.calls += 1"),
        (CalledOtherwise(), "it does more than compute: SEEN.append(x)"),
        (Callable(), "the code of a Callable cannot be read"),
        (os.listdir, "the code of a builtin_function_or_method cannot be read"),
        (eval("lambda x: x"), "what it depends on cannot be read"),
    ],
    ids=name,
)
def test_what_does_more_or_cannot_be_read_may_not(called, why):
    assert hazard(called).startswith(why)
    assert SEEN == []


def test_each_function_is_asked_about_once_and_kept_alive_by_nobody():
    asked = []

    @remembered
    def name_of(function):
        asked.append(1)
        return function.__name__

    def one():
        pass

    assert [name_of(one), name_of(one), name_of(computes)] == ["one", "one", "computes"]
    assert len(asked) == 2
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


def test_what_has_no_hash_is_asked_about_each_time():
    class Unhashable:
        __hash__ = None

    asked = []
    find = remembered(lambda each: asked.append(each))
    each = Unhashable()
    find(each), find(each)
    assert asked == [each, each]
