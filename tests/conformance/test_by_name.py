"""The guard treats arguments that are passed by name like those that are passed by position."""

import pytest
import torch
from conformance.zoo import kernels, specimens
from torch import nn

from fuseplug import KernelManager


@pytest.fixture(scope="module")
def fused():
    manager, model = KernelManager({}), nn.Sequential(specimens.NamedNorm())
    manager.register(kernels.NamedNorm)
    applied = manager.apply_all(model, every_size=True, include="zoo_named_norm")
    return model[0], applied


X, WEIGHT = torch.linspace(-3, 3, 64).view(2, 2, 16), torch.linspace(0.5, 1.5, 16)
SHIFT = torch.linspace(-1, 1, 16)

CALLS = {
    "as tried": (True, (X,), {"weight": WEIGHT}),
    "all by name, in another order": (True, (), {"weight": WEIGHT, "x": X}),
    "a tensor more": (True, (X,), {"shift": SHIFT, "weight": WEIGHT}),
    "defaults": (True, (X,), {"weight": WEIGHT, "shift": None, "centred": False, "dtype": None}),
    "a dtype": (True, (X,), {"weight": WEIGHT, "shift": SHIFT, "dtype": torch.bfloat16}),
    "a dtype that was not tried": (False, (X,), {"weight": WEIGHT, "shift": SHIFT, "dtype": torch.float64}),
    "a flag that the adapter leaves": (False, (X,), {"weight": WEIGHT, "centred": True}),
    "a name that is ignored": (True, (X,), {"weight": WEIGHT, "output_attentions": True}),
    "a weight of a dtype that was not tried": (False, (X,), {"weight": WEIGHT.double()}),
    "dtypes that were not tried together": (False, (X,), {"weight": WEIGHT.half()}),
    "a number for a tensor": (False, (X,), {"weight": WEIGHT, "shift": 2.0}),
}


@pytest.mark.parametrize(("by_the_kernel", "args", "kwargs"), CALLS.values(), ids=list(CALLS))
def test_a_call_is_the_kernels_if_it_was_verified(fused, by_the_kernel, args, kwargs):
    module, applied = fused
    before = applied.calls()[0].fused
    made = module(*args, **kwargs)
    assert (applied.calls()[0].fused - before == 1) is by_the_kernel
    torch.testing.assert_close(made, type(module).forward(module, *args, **kwargs))


def test_what_the_original_refuses_it_refuses_still(fused):
    with pytest.raises(TypeError, match="weight"):
        fused[0](X)
