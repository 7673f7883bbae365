"""Branches that constants of Python modules decide: the other side is not read, until one of them changes."""

import functools
import types

import pytest
import torch
from support.attacking import attacked, changing, numbers
from support.kernels import NormKernel
from support.models import Norm

HAS_VENDOR, BACKEND, VENDOR, LEVELS, VENDOR_OF_TURN = False, "cpu", None, [], False
CALLS = []
PROBES = types.ModuleType("probes")
exec("READY = False\ndef ready():\n    return READY\n", vars(PROBES))


class Vendor:
    def norm(self, x):
        CALLS.append(x.shape)
        return x * 2


vendor = Vendor()


def normal(self, x):
    wide = x.to(torch.float32)
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def has_vendor():
    """Whether the vendor's library is there."""
    return HAS_VENDOR


def has_cpu_alone(strict=True):
    return not has_vendor() and BACKEND == "cpu"


@functools.lru_cache
def memoised():
    return bool(HAS_VENDOR and CALLS is not None)


def taking(level):
    return HAS_VENDOR if level else False


def looping():
    one = two = three = HAS_VENDOR
    for _ in range(3):
        three, two, one = two, one, True
    return three


class ByFlag(Norm):
    def forward(self, x):
        if HAS_VENDOR:
            return vendor.norm(x)
        return normal(self, x)


class ByProbe(Norm):
    def forward(self, x):
        if has_vendor() and self.weight is not None:
            import torch_of_a_vendor

            return torch_of_a_vendor.norm(x)[0] if x.is_cuda else vendor.norm(x)
        return normal(self, x)


class ByTwo(Norm):
    def forward(self, x):
        return normal(self, x) if has_cpu_alone() else vendor.norm(x)


class ByName(Norm):
    def forward(self, x):
        if BACKEND != "cpu" or VENDOR is not None:
            x = vendor.norm(x)
        return normal(self, x)


class ByModule(Norm):
    def forward(self, x):
        return (PROBES.READY and vendor.norm(x)) or normal(self, x) if PROBES.READY else normal(self, x)


class ByLeaving(Norm):
    def forward(self, x):
        if not HAS_VENDOR:
            return normal(self, x)
        return vendor.norm(x)


class ByMemory(Norm):
    def forward(self, x):
        return vendor.norm(x) if memoised() else normal(self, x)


class ByScripting(Norm):
    def forward(self, x):
        if torch.jit.is_scripting():
            return vendor.norm(x)
        return normal(self, x)


class ByTracing(Norm):
    def forward(self, x):
        return normal(self, x) * 2 if torch.jit.is_tracing() else normal(self, x)


FLIPS = {
    ByFlag: ("HAS_VENDOR", True),
    ByTwo: ("BACKEND", "npu"),
    ByName: ("VENDOR", vendor),
    ByLeaving: ("HAS_VENDOR", True),
}


@pytest.fixture(autouse=True)
def filled():
    memoised.cache_clear()
    memoised()
    yield
    memoised.cache_clear()


@pytest.mark.parametrize("make", [*FLIPS, ByProbe, ByModule, ByMemory, ByScripting, ByTracing])
def test_the_live_branch_alone_is_read(make):
    assert attacked([NormKernel], make).answers == ("kernel",)


@pytest.mark.parametrize("make", FLIPS)
def test_a_constant_that_changes_is_seen_and_so_is_that_it_changes_back(monkeypatch, make):
    name, value = FLIPS[make]
    there, back = changing(monkeypatch, globals(), name, value), changing(monkeypatch, globals(), name, globals()[name])
    assert attacked([NormKernel], make, there, back).answers == ("kernel", "original", "kernel")


def test_a_constant_of_another_module_that_changes_is_seen(monkeypatch):
    change = changing(monkeypatch, PROBES, "READY", True)
    assert attacked([NormKernel], ByModule, change).answers == ("kernel", "original")


def test_a_memoised_answer_that_changes_is_seen(monkeypatch):
    def change(_):
        monkeypatch.setitem(globals(), "HAS_VENDOR", True)
        memoised.cache_clear()

    assert attacked([NormKernel], ByMemory, change).answers == ("kernel", "original")


def test_a_probe_that_is_replaced_is_seen(monkeypatch):
    change = changing(monkeypatch, globals(), "has_cpu_alone", lambda: False)
    assert attacked([NormKernel], ByTwo, change).answers == ("kernel", "original")


def test_what_is_traced_takes_the_other_branch():
    from support.attacking import fused

    module, x = ByTracing(), numbers()
    fused(module, [NormKernel])
    traced = torch.jit.trace(module, x, check_trace=False)
    torch.testing.assert_close(traced(x), 2 * normal(module, x))


class ByOwnFlag(Norm):
    def __init__(self):
        super().__init__()
        self.vendor = False

    def forward(self, x):
        return vendor.norm(x) if self.vendor else normal(self, x)


class ByLocal(Norm):
    def forward(self, x):
        has = first = HAS_VENDOR
        for _ in range(3):
            if has:
                CALLS.append(x.shape)
            has, first = first, True
        return normal(self, x)


class ByLaterLocal(Norm):
    def forward(self, x):
        for turn in range(3):
            if turn and VENDOR_OF_TURN:  # noqa: F823 - bound below, in the turn before
                CALLS.append(x.shape)
            VENDOR_OF_TURN = turn == 1  # noqa: F841
        return normal(self, x)


class ByArgument(Norm):
    def forward(self, x):
        return vendor.norm(x) if taking(x.dim() > 7) else normal(self, x)


class ByLoop(Norm):
    def forward(self, x):
        if looping():
            CALLS.append(x.shape)
        return normal(self, x)


class ByContainer(Norm):
    def forward(self, x):
        return vendor.norm(x) if LEVELS else normal(self, x)


class BySetting(Norm):
    def forward(self, x):
        if torch.backends.cudnn.benchmark:
            CALLS.append(x.shape)
        return normal(self, x)


class ByLive(Norm):
    def forward(self, x):
        if not has_vendor():
            CALLS.append(x.shape)
        return normal(self, x)


@pytest.mark.parametrize("make", [ByOwnFlag, ByLocal, ByLaterLocal, ByArgument, ByLoop, ByContainer, BySetting, ByLive])
def test_where_anything_else_decides_both_sides_are_read(make):
    found = attacked([NormKernel], make)
    assert found.last == "alone"
    assert "more than compute" in found.alone


def test_a_memoised_probe_that_was_never_asked_is_not_asked():
    memoised.cache_clear()
    found = attacked([NormKernel], ByMemory)
    assert found.last == "alone"
