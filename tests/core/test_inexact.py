"""A kernel whose original nobody can equal bit for bit states a tolerance; wrong semantics are still found."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuseplug import Adapter, BaseKernel, Example, Proposal, Target

HIDDEN = 16


class Backwards(nn.Module):
    """``silu(gate) * up`` summed over groups from the last to the first; no reference here does so."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2 * HIDDEN, HIDDEN))

    def forward(self, x, scale):
        y = torch.zeros_like(x)
        for weight in self.weight.flip(0):
            gate, up = F.linear(x, weight).chunk(2, -1)
            y = y + F.silu(gate) * up * scale
        return y


def right(x, scale, weight):
    gate, up = torch.einsum("...i,goi->...go", x, weight).chunk(2, -1)
    return (F.silu(gate) * up).sum(-2) * scale


def other_activation(x, scale, weight):
    gate, up = torch.einsum("...i,goi->...go", x, weight).chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).sum(-2) * scale


def slightly_off(x, scale, weight):
    return right(x, scale, weight) * (1 + 1e-4)


def wrong_gradient(x, scale, weight):
    y = right(x, scale, weight)
    return y.detach() + 0.5 * (y - y.detach())


def one_gradient_less(x, scale, weight):
    return right(x, scale.detach(), weight)


def wider(x, scale, weight):
    return right(x, scale, weight).to(torch.promote_types(x.dtype, torch.float32))


def writing(x, scale, weight):
    y = right(x, scale, weight)
    x.mul_(2)
    return y


WRONG = [other_activation, slightly_off, wrong_gradient, one_gradient_less, wider, writing]


@dataclass(frozen=True)
class Summing(Adapter):
    variant: str = "sum"

    def bind(self, compute):
        return lambda module, x, scale: compute(x, scale, module.weight)


def example(dtype, size, generator):
    tensors = [torch.randn(shape, generator=generator) for shape in ((max(4, size // HIDDEN), HIDDEN), (HIDDEN,))]
    weight = torch.randn(3, 2 * HIDDEN, HIDDEN, generator=generator) * HIDDEN**-0.5
    return Example([t.to(dtype) for t in tensors], {"weight": weight.to(dtype)})


def kernel(reference, *, exact=False, mixes=(torch.float32, torch.bfloat16)):
    class Sum(BaseKernel):
        kernel_id = "sum"
        op = "sum"

        def match(self, site):
            if not isinstance(site.module, Backwards):
                return None
            return [Proposal(Target(), (Summing(),), example, mixes, roundings=8.0, exact=exact)]

    Sum.reference = f"{__name__}:{reference.__name__}"
    Sum.function = f"{__name__}:right"
    return Sum


def entry(manager, made):
    manager.register(made)
    (found,) = manager.plan(Backwards()).report.entries
    return found


def test_another_order_of_sums_is_not_bitwise_the_same(manager):
    found = entry(manager, kernel(right, exact=True))
    assert found.rejections[0][1].kind == "unlike"


def test_another_order_of_sums_is_accepted_where_it_is_said_not_to_be_exact(manager):
    found = entry(manager, kernel(right))
    assert found.fused, found.why_not
    assert found.check == "passed"


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_semantics_are_told_apart_all_the_same(manager, wrong):
    found = entry(manager, kernel(wrong))
    assert not found.fused
    assert found.rejections[0][1].kind == "unlike"


def test_it_is_float32_that_tells_close_ones_apart(manager):
    assert entry(manager, kernel(slightly_off, mixes=(torch.bfloat16,))).fused


def test_exact_must_be_said_plainly(manager):
    manager.register(kernel(right, exact="no"))
    (why,) = manager.plan(Backwards()).report.raised.values()
    assert "exact must be True or False, not 'no'" in why


def test_a_large_module_may_be_tried_small(manager):
    class Sized(Backwards):
        def __init__(self):
            super().__init__()
            self.hidden = 1 << 20

        def forward(self, x, scale):
            return super().forward(x.view(-1, self.hidden), scale)

    def small(dtype, size, generator):
        made = example(dtype, size, generator)
        return Example(made.args, made.parameters, attributes={"hidden": HIDDEN})

    class Sum(kernel(right)):
        def match(self, site):
            (proposal,) = super().match(site)
            return [Proposal(proposal.target, proposal.adapters, small, proposal.mixes, roundings=8.0, exact=False)]

    module = Sized()
    manager.register(Sum)
    (found,) = manager.plan(module).report.entries
    assert found.fused, found.why_not
    assert module.hidden == 1 << 20
