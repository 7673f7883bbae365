"""The mixes of dtypes in which a kernel is run and used, and calls whose arguments a kernel refuses."""

from dataclasses import dataclass

import pytest
import torch
from support.kernels import NormKernel, quiet_norm, variant_of
from support.models import Norm, inputs
from torch import nn

from fuseplug import Adapter, BaseKernel, Example, Proposal, Target

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


class BiasedOrScaled(nn.Module):
    def forward(self, x, bias, scale):
        return shifted(x, bias, scale)


def shifted(x, bias, scale):
    y = x if bias is None else x + bias
    return y if scale is None else y * scale


def wrong_if_both(x, bias, scale):
    return shifted(x, bias, None) if scale is None else shifted(x, None, scale)


@dataclass(frozen=True)
class Shifting(Adapter):
    variant: str = "shifted"

    def bind(self, compute):
        return lambda module, x, bias, scale: compute(x, bias, scale)


class ShiftKernel(BaseKernel):
    """A kernel that is right for all its mixes, which name what is given, but not beyond them."""

    kernel_id = op = "shift"
    reference = f"{__name__}:shifted"
    function = f"{__name__}:wrong_if_both"
    mixes = ("bias", "scale")
    likely = None

    def match(self, site):
        if not isinstance(site.module, BiasedOrScaled):
            return None
        return [Proposal(Target(), (Shifting(),), shifted_example, self.mixes, likely=self.likely)]


def shifted_example(mix, size, generator):
    rows = torch.randn(max(4, size // 8), 8, generator=generator)
    bias, scale = (torch.randn(8, generator=generator) if name in mix else None for name in ("bias", "scale"))
    return Example([rows, bias, 2 if "twice" in mix else scale])


@pytest.mark.parametrize(
    ("options", "mix", "why"),
    [
        ({}, "bias", ""),
        ({}, "scale", ""),
        ({}, "bias and scale", "each of its arguments was tried, but not all of them together"),
        ({"mixes": ("bias", "twice")}, "twice", ""),
        ({"mixes": ("bias", "twice")}, "bias and twice", "each of its arguments was tried, but not all of them"),
        ({"likely": ()}, "scale", "argument 2 is of a kind that was not tried"),
        ({"mixes": ("bias", "bias and scale"), "likely": ()}, "bias and scale", "argument 3 is of a kind"),
    ],
)
def test_a_kernel_computes_only_calls_like_those_in_which_it_was_run(manager, options, mix, why):
    manager.register(variant_of(ShiftKernel, **options))
    module = BiasedOrScaled()
    applied = manager.apply_all(module)
    arguments = shifted_example(mix, 32, torch.Generator().manual_seed(0)).args
    tried = applied.try_(*arguments)
    torch.testing.assert_close(tried.result, shifted(*arguments))
    (calls,) = tried
    assert (calls.fused, calls.original) == ((0, 1) if why else (1, 0))
    assert why in "".join(calls.reasons)
