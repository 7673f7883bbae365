"""A kernel whose function is the reference, so that tests of what is found compile nothing."""

import pytest
from support.managers import manager_of

from fuseplug_causal_conv1d.kernels import CausalConv1dKernel


class ReferenceConvolution(CausalConv1dKernel):
    kernel_id = "reference_causal_conv1d"
    function = "fuseplug_causal_conv1d.reference:causal_conv1d"


@pytest.fixture(name="manager")
def _manager():
    return manager_of(ReferenceConvolution)
