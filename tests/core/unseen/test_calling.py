"""A call means what Python binds. However it is written, the kernel or the original gets it, and it is counted."""

from dataclasses import dataclass, replace

import pytest
import torch
from support.attacking import attacked, fused, numbers
from support.kernels import NormAdapter, NormKernel, quiet_norm
from support.models import Norm
from torch import nn

from fuseplug import Adapter, BaseKernel, Example, Proposal, Target


def normal(self, x):
    wide = x.to(torch.float32)
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Optional(Norm):
    def forward(self, x, residual=None, scale=1.0, *, double=False):
        y = normal(self, x) * scale
        if residual is not None:
            y = y + residual
        return y * 2 if double else y


class Ignoring(Norm):
    def forward(self, x, **kwargs):
        return normal(self, x)


class Passing(Norm):
    """Hands what it does not know to what it calls, as decoder layers do."""

    def forward(self, x, **kwargs):
        return self._inner(x, **kwargs)

    def _inner(self, x, **kwargs):
        return normal(self, x) * 2 if kwargs.get("double") else normal(self, x)


ONE = numbers()
CALLS = {
    "by keyword": (Norm, [], {"hidden_states": ONE}, "kernel"),
    "a default given": (Optional, [ONE, None], {}, "kernel"),
    "all defaults given": (Optional, [ONE, None, 1.0], {"double": False}, "kernel"),
    "a default given by keyword": (Optional, [ONE], {"residual": None}, "kernel"),
    "a residual": (Optional, [ONE, numbers(seed=3)], {}, "original"),
    "a number": (Optional, [ONE], {"scale": 3.0}, "original"),
    "a flag": (Optional, [ONE], {"double": True}, "original"),
    "a keyword that is ignored": (Ignoring, [ONE], {"num_items_in_batch": 3}, "kernel"),
    "a tensor that is ignored": (Ignoring, [ONE], {"attention_mask": ONE}, "kernel"),
    "a keyword that is passed on": (Passing, [ONE], {"double": True}, "original"),
    "one too many": (Norm, [ONE, ONE], {}, "original"),
    "one that nobody knows": (Norm, [ONE], {"unknown": 1}, "original"),
    "none": (Norm, [], {}, "original"),
    "no tensor": (Norm, [3.0], {}, "original"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_means_what_it_meant(case):
    make, args, kwargs, by = CALLS[case]
    met = attacked([NormKernel], make, given=[args], kwargs=kwargs)
    # A branch that only options reach may keep a module from being fused at all.
    assert met.last in ((by, "alone") if make in (Optional, Passing) else (by,)), met
    assert met.reasons or met.last != "original"


class Layer(nn.Module):
    """A decoder layer in the small, with what trainers hand through it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.eps = 1e-6

    def forward(self, hidden_states, attention_mask=None, position_ids=None, use_cache=False, **kwargs):
        return hidden_states + normal(self, hidden_states)


def layer_reference(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return x + weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_kernel(x, weight, eps):
    return x + quiet_norm(x, weight, eps)


@dataclass(frozen=True)
class LayerAdapter(Adapter):
    variant: str = "plain"

    def bind(self, compute):
        def layer(module, hidden_states, attention_mask=None):
            return compute(hidden_states, module.weight, module.eps)

        return layer


class LayerKernel(BaseKernel):
    kernel_id = "toy_layer"
    op = "toylayer"
    function = "support.kernels:fused_norm"
    reference = "support.kernels:norm_reference"
    check_sizes = (512,)

    def load(self):
        return layer_kernel

    def load_reference(self):
        return layer_reference

    def match(self, site):
        def example(dtype, size, generator):
            x = torch.randn(2, max(2, size // 32), 16, generator=generator)
            return Example([x.to(dtype)], {"weight": torch.randn(16, generator=generator).to(dtype)})

        return [Proposal(Target(), (LayerAdapter(),), example, (torch.float32,))]


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"num_items_in_batch": torch.tensor(3)},
        {"use_cache": False, "attention_mask": None},
        {"position_ids": None, "num_items_in_batch": 7, "output_attentions": False},
    ],
    ids=lambda kwargs: ", ".join(kwargs),
)
def test_a_layer_gets_what_trainers_hand_through(kwargs):
    met = attacked([LayerKernel], Layer, given=[[ONE]], kwargs=kwargs)
    assert met.last == "kernel", met


def test_what_was_not_tried_goes_to_the_original_and_is_counted():
    model = nn.Sequential(Norm())
    applied = fused(model, [NormKernel])
    model[0](numbers(dtype=torch.float64))
    (calls,) = applied.calls()
    assert (calls.fused, calls.original) == (0, 1)
    tried = applied.try_(numbers(dtype=torch.float64))
    assert "dtype" in tried.not_reached[0].reasons[0]


@dataclass(frozen=True)
class Choosy(NormAdapter):
    """Leaves what is long to the original."""

    def bind(self, compute):
        bound = super().bind(compute)
        return lambda module, x: NotImplemented if x.shape[-2] > 100 else bound(module, x)


class ChoosyNormKernel(NormKernel):
    function = "support.kernels:quiet_norm"

    def match(self, site):
        return [
            replace(each, adapters=tuple(Choosy(**vars(adapter)) for adapter in each.adapters))
            for each in super().match(site) or []
        ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("rows", "computed"), [(50, "kernel"), (150, "original")])
def test_what_an_adapter_leaves_to_the_original_is_the_originals(rows, computed, compiled):
    met = attacked([ChoosyNormKernel], Norm, given=[[numbers((2, rows, 16))]], compiled=compiled)
    assert met.last == ("unseen" if compiled else computed), met
    assert compiled or computed == "kernel" or met.reasons == ("the kernel's adapter leaves it to the original",)
