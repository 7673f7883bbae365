"""A call means what Python binds. However it is written, the kernel or the original computes it, and it is counted."""

from dataclasses import dataclass, replace

import pytest
from support.attacking import attacked, numbers
from support.kernels import NormAdapter, NormKernel
from support.models import Norm, normal


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
    """Passes keywords that it does not know on to the method that it calls, as decoder layers do."""

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


@dataclass(frozen=True)
class Choosy(NormAdapter):
    """An adapter that leaves long inputs to the original."""

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
