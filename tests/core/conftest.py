import pytest
import torch
from support import kernels
from support.models import Toy

from fuseplug import KernelManager

torch.set_num_threads(1)  # small tensors, and several runs at once on few cores


@pytest.fixture
def manager():
    """A manager of its own, in which what happens to be installed takes no part."""
    return KernelManager(environ={"FUSEPLUG_ALLOW": ""})


@pytest.fixture
def fusing(manager):
    """A manager with the right kernels."""
    for kernel in (kernels.NormKernel, kernels.RotaryKernel):
        manager.register(kernel)
    return manager


@pytest.fixture
def model():
    return Toy().eval()


@pytest.fixture(autouse=True)
def _as_it_was():
    kernels.ran.clear()
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    assert torch.get_default_dtype() is torch.float32, "a test left another default dtype behind"
