"""Branches that constants of Python modules decide: both sides are read, and the constants are watched."""

import functools
import types

import pytest
import torch
from support.attacking import attacked, changing, numbers
from support.kernels import NormKernel
from support.models import Norm, normal

HAS_VENDOR, VENDOR, FACTOR = False, None, 1.0
CALLS = []
PROBES = types.ModuleType("probes")
exec("READY = False\ndef ready():\n    return READY\n", vars(PROBES))


class Vendor:
    def norm(self, x):
        CALLS.append(x.shape)
        return x * 2


vendor = Vendor()


def has_vendor():
    """Whether the vendor's library is installed."""
    return HAS_VENDOR


@functools.lru_cache
def memoised():
    return HAS_VENDOR


class ByFlag(Norm):
    def forward(self, x):
        return normal(self, x) * 2 if HAS_VENDOR else normal(self, x)


class ByProbe(Norm):
    def forward(self, x):
        if has_vendor() and self.weight is not None:
            import torch_of_a_vendor

            return torch_of_a_vendor.norm(x)[0]
        return normal(self, x)


class ByName(Norm):
    def forward(self, x):
        if VENDOR is not None:
            return VENDOR.norm(x)
        return normal(self, x) * FACTOR


class ByMemory(Norm):
    def forward(self, x):
        return normal(self, x) * 2 if memoised() else normal(self, x)


FLIPS = {ByFlag: ("HAS_VENDOR", True), ByProbe: ("HAS_VENDOR", True), ByName: ("VENDOR", vendor)}


@pytest.fixture(autouse=True)
def filled():
    memoised.cache_clear()
    memoised()
    yield
    memoised.cache_clear()


class AsInTimm(Norm):
    def forward(self, x):
        if torch.jit.is_scripting():
            return vendor.norm(x)
        wide = x.to(torch.float32)
        dims = tuple(range(-1, -len(self.weight.shape) - 1, -1))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize("make", [*FLIPS, ByMemory, AsInTimm])
def test_a_norm_that_asks_what_is_installed_is_fused(make):
    assert attacked([NormKernel], make).answers == ("kernel",)


@pytest.mark.parametrize("make", FLIPS)
def test_a_constant_that_changes_is_seen_and_so_is_that_it_changes_back(monkeypatch, make):
    name, value = FLIPS[make]
    there, back = changing(monkeypatch, globals(), name, value), changing(monkeypatch, globals(), name, globals()[name])
    assert attacked([NormKernel], make, there, back).answers == ("kernel", "original", "kernel")


def test_a_memoised_answer_that_changes_is_seen(monkeypatch):
    def change(_):
        monkeypatch.setitem(globals(), "HAS_VENDOR", True)
        memoised.cache_clear()

    assert attacked([NormKernel], ByMemory, change).answers == ("kernel", "original")


def test_a_probe_that_is_replaced_is_seen(monkeypatch):
    change = changing(monkeypatch, globals(), "has_vendor", lambda: True)
    assert attacked([NormKernel], ByProbe, change).answers == ("kernel", "original")


def effect(x):
    CALLS.append(x.shape)
    return x


class OtherSide(Norm):
    def forward(self, x):
        return effect(x) if HAS_VENDOR else normal(self, x)


class OtherSideOfAModule(Norm):
    def forward(self, x):
        return effect(x) if PROBES.READY else normal(self, x)


class OtherSideByArgument(Norm):
    def forward(self, x):
        if x.dim() > 7:
            effect(x)
        return normal(self, x)


class ByLaterLocal(Norm):
    def forward(self, x):
        has = first = HAS_VENDOR
        for _ in range(3):
            if has:
                effect(x)
            has, first = first, True
        return normal(self, x)


@pytest.mark.parametrize("make", [OtherSide, OtherSideOfAModule, OtherSideByArgument, ByLaterLocal])
def test_a_side_that_does_more_than_compute_counts_whether_or_not_it_is_taken(make):
    found = attacked([NormKernel], make)
    assert found.last == "alone"
    assert "more than compute" in found.alone


class ByContext(Norm):
    def forward(self, x):
        return normal(self, x) * 2 if torch.jit.is_tracing() else normal(self, x)


class BySetting(Norm):
    def forward(self, x):
        return normal(self, x) * 2 if torch.backends.cudnn.benchmark else normal(self, x)


@pytest.mark.parametrize("make", [ByContext, BySetting])
def test_a_question_whose_answer_is_not_watched_is_not_read(make):
    found = attacked([NormKernel], make, given=[[numbers()]])
    assert found.last == "alone"
    assert "cannot be read" in found.alone
