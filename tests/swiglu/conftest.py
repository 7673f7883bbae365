"""Fixtures that the tests of gated MLPs share."""

import pytest
import torch
from support.managers import manager_of

from fuseplug_swiglu.kernels import InductorSwiGLUKernel, SwiGLUKernel


class Referring(SwiGLUKernel):
    """Runs the reference, because the choice of adapter does not depend on the kernel."""

    kernel_id = "reference_swiglu"
    function = "fuseplug_swiglu.reference:swiglu"


@pytest.fixture
def alone():
    """Makes a manager with one kernel, whatever else happens to be installed."""

    def make(kernel=Referring):
        return manager_of(kernel)

    return make


@pytest.fixture
def ran(everything_compiled, backend):
    """The compiled programs that are started, including those for small inputs."""
    if why := InductorSwiGLUKernel().unavailable("cpu"):
        pytest.skip(why)
    return backend.order


def outcome(module, x):
    """The output of *module* for *x*, in training or eval mode, and every gradient, by name."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(0)
    y = module(x)
    module.zero_grad()
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    found = {"output": y.detach(), "input's gradient": x.grad}
    return found | {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.fixture(name="outcome")
def _outcome():
    return outcome
