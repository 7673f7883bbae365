"""A kernel whose first call compiles may declare a rehearsal, in which a plan calls it before the check."""

from __future__ import annotations

import contextlib

import pytest
from support.kernels import NormKernel, fused_norm, variant_of
from support.managers import manager_of
from support.models import Norm

from fuseplug.discovery.kernel_faults import faults

steps: list[str] = []


@contextlib.contextmanager
def entered(name):
    steps.append(f"+{name}")
    yield rehearsing
    steps.append(f"-{name}")


@contextlib.contextmanager
def rehearsing():
    steps.append("+rehearsal")
    yield
    steps.append("-rehearsal")


def building():
    return entered("building")


def nothing_to_gain():
    return contextlib.nullcontext()


def broken():
    raise OSError("planted")


def computed(*args, **kwargs):
    steps.append("call")
    return fused_norm(*args, **kwargs)


def rehearsed(path):
    return variant_of(NormKernel, function=f"{__name__}:computed", rehearsal={"cpu": f"{__name__}:{path}"})


def plan(kernel, **options):
    steps.clear()
    (entry,) = manager_of(kernel).plan(Norm(), **options).report.entries
    assert entry.kernel_id == kernel.kernel_id
    return [step for step, before in zip(steps, [None, *steps], strict=False) if step != before]


def test_it_is_called_ahead_where_it_says_and_checked_after():
    assert plan(rehearsed("building")) == ["+building", "+rehearsal", "call", "-rehearsal", "call", "-building"]


@pytest.mark.parametrize("path", ["nothing_to_gain", "broken", "missing"])
def test_it_is_only_checked_where_that_saves_nothing_or_breaks(path):
    assert plan(rehearsed(path)) == ["call"]


def test_where_nothing_is_checked_nothing_is_rehearsed():
    assert plan(rehearsed("building"), verify=False) == []


def test_it_is_rehearsed_on_the_devices_that_it_names():
    elsewhere = variant_of(rehearsed("building"), rehearsal={"cuda": f"{__name__}:building"})
    assert plan(elsewhere) == ["call"]


@pytest.mark.parametrize("said", ["a:b", {"cpu": "a.b"}, {"cpu": None}])
def test_it_names_functions_by_device_type(said):
    (fault,) = faults(variant_of(NormKernel, rehearsal=said))
    assert "rehearsal must be a mapping" in fault
