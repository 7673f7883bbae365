"""The mixes of dtypes in which a kernel is run and used, and calls whose arguments a kernel refuses."""

import pytest
import torch
from support.kernels import NormKernel, quiet_norm, variant_of
from support.models import Norm, inputs
from torch import nn

pytestmark = pytest.mark.usefixtures("examined_once")

HALVES = (torch.bfloat16, torch.float16)


def refusing(x, weight, eps, offset=None, cast_last=False):
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be {[*x.shape[-1:]]}; it is {[*weight.shape]}")
    return quiet_norm(x, weight, eps, offset, cast_last)


class Derived(NormKernel):
    """A kernel whose proposals do not say which mixes are likely."""

    kernel_id = "derived_norm"

    def proposal(self, site, hidden, eps, dtype):
        from dataclasses import replace

        return replace(super().proposal(site, hidden, eps, dtype), likely=None)


@pytest.fixture
def applied_to(manager):
    """Apply one kernel to a norm in float32; return the norm and the handle."""

    def apply(kernel):
        manager.register(kernel)
        model = Norm()
        return model, manager.apply_all(model)

    return apply


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_all_mixes_of_the_module_s_own_dtypes_are_the_kernel_s(applied_to, dtype):
    model, applied = applied_to(Derived)
    model(inputs(dtype=dtype))
    assert [(calls.fused, calls.original) for calls in applied.calls()] == [(1, 0)]
    other, (calls,) = model.to(dtype), applied.calls()
    other(inputs(dtype=dtype))
    assert [each.original for each in applied.calls()] == [calls.original + 1]


def test_a_call_whose_arguments_the_kernel_refuses_is_the_original_s(applied_to):
    model, applied = applied_to(variant_of(NormKernel, function=f"{__name__}:refusing"))
    model.weight = nn.Parameter(torch.full((1,), 2.0))
    tried = applied.try_(inputs())
    assert torch.equal(tried.result, type(model).forward(model, inputs()))
    (calls,) = tried
    assert (calls.fused, calls.original) == (0, 1)
    assert calls.reasons[0].startswith("the kernel refuses its arguments: ValueError: weight must be [")
