"""A kernel whose numbers lean to one side is refused."""

import pytest
import torch
from support.kernels import NormKernel, quiet_norm, variant_of
from support.managers import manager_of
from support.models import Norm

pytestmark = pytest.mark.usefixtures("examined_once")


class Leaning(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, only_large, factor):
        ctx.factor = factor if value.numel() > only_large else 1.0
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None, None


def gradient_leans(x, *rest):
    return quiet_norm(Leaning.apply(x, 0, 1.004), *rest)


def gradient_leans_when_large(x, *rest):
    return quiet_norm(Leaning.apply(x, 5000, 1.01), *rest)


def weight_gradient_leans(x, weight, *rest):
    return quiet_norm(x, Leaning.apply(weight, 0, 1.02), *rest)


def value_leans(x, *rest):
    return quiet_norm(x, *rest) * 1.004


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("gradient_leans", r"gradient of args\[0\] is 0.\d+% too large on average over"),
        ("gradient_leans_when_large", r"384, 16\] on cpu: gradient of args\[0\] is \d.\d+% too large"),
        (
            "weight_gradient_leans",
            r"gradient of weight is \d.\d+% too large on average over 80 .*in 5 examples",
        ),
        ("value_leans", r"output\[0\] is 0.\d+% too large on average over"),
    ],
)
def test_a_kernel_that_leans_is_refused(function, why):
    kernel = variant_of(NormKernel, "leaning", function=f"{__name__}:{function}", check_sizes=(512, 4096))
    (entry,) = manager_of(kernel).plan(Norm().bfloat16()).report.left_alone
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(entry.why_not)
