"""Whose error it is: an error of the original or the kernel is a finding, an error of the kit is not."""

import re
from dataclasses import replace

import pytest
import torch
from conformance.test_zoo import alone
from conformance.zoo import kernels
from torch import nn

from fuseplug_testing import check_kernel, modules, numbers, returned
from fuseplug_testing.attempts import KitError, foreign
from fuseplug_testing.results import Finding
from fuseplug_testing.subjects import Examined


def without_names(*_):
    """Make a decorator whose functions pass on positional arguments only."""
    return lambda function: lambda *args: function(*args)


def raising(*_, **__):
    """Fail in a Python function of torch, as a faulty wrapper would."""
    return nn.functional.pad(torch.ones(2), (1, 1, 1, 1), mode="reflect")


BREAKS = {
    "autocast, without names": ("autocast", modules, "within", without_names),
    "no-grad, without names": ("no-grad", numbers, "within", without_names),
    "default-device, without names": ("default-device", returned, "within", without_names),
    "results, without names": ("results", returned, "followed_by", lambda function, _: lambda *args: function(*args)),
    "autocast, raising": ("autocast", modules, "within", lambda _: lambda function: raising),
    "in-place, raising": ("in-place", modules, "followed_by", lambda function, _: raising),
    "checkpoint, raising": ("checkpoint", modules, "checkpoint", raising),
    "layouts, raising": ("layouts", numbers, "MEMORY_LAYOUTS", {"broken": raising}),
    "gradients, raising": ("gradients", numbers, "UPSTREAM", {"broken": raising}),
    "copies, raising": ("copies", modules, "spoilt", raising),
    "casts, raising": ("casts", modules, "_cast", raising),
}


@pytest.mark.parametrize(("check", "module", "name", "broken"), BREAKS.values(), ids=list(BREAKS))
def test_an_error_of_the_kit_is_nobody_elses(monkeypatch, check, module, name, broken):
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(KitError, match=f"^{check} of zoo_named_norm, 0 NamedNorm: the conformance kit itself failed"):
        check_kernel(kernels.NamedNorm, checks=alone(check))


class _RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("no backward")


def forward_raises(module, x, *, weight):
    raise NotImplementedError("no forward")


def backward_raises(module, x, *, weight):
    return _RaisesBackward.apply(x * weight)


@pytest.fixture(scope="module")
def case():
    return Examined(kernels.NamedNorm).specimens[0].cases[0]


@pytest.mark.parametrize("function", [forward_raises, backward_raises])
def test_what_the_original_raises_is_a_skip_and_what_the_kernel_raises_a_fault(case, function):
    why = f"NotImplementedError: no {function.__name__.partition('_')[0]}"
    skipped = case.compare("here", case.example(), original=foreign(function))
    assert skipped == Finding("here", skipped=f"the original raises here ({why})")
    fault = case.compare("here", case.example(), function=foreign(function))
    line = re.escape(f"raises {why} ({__file__}:") + r"\d+\), where the original does not"
    assert re.fullmatch(line, fault.fault)


def test_what_becomes_of_a_result_belongs_to_the_example(case):
    example = replace(case.example(), after=foreign(lambda result: result.view(1, 2, 3)))
    assert case.compare("here", example).skipped.startswith("the original raises here (RuntimeError: shape")


def test_what_is_not_marked_is_the_kits(case):
    for broken in (forward_raises, lambda x: x, raising):
        with pytest.raises(KitError, match="the conformance kit itself failed"):
            case.compare("here", case.example(), original=broken)
