"""A kernel whose function is the reference, so that what is found can be tested without compiling anything."""

from __future__ import annotations

import pytest

from fuseplug import KernelManager
from fuseplug_causal_conv1d.kernels import CausalConv1dKernel


class ReferenceConvolution(CausalConv1dKernel):
    kernel_id = "reference_causal_conv1d"
    function = "fuseplug_causal_conv1d.reference:causal_conv1d"


@pytest.fixture(name="manager")
def _manager():
    manager = KernelManager(environ={"FUSEPLUG_KERNELS": "reference_causal_conv1d"})
    manager.register(ReferenceConvolution)
    return manager
