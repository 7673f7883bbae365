"""A RoPE kernel whose function is the reference, so that tests of what is found compile nothing."""

import pytest
from support.managers import manager_of

from fuseplug_rope.kernels import RoPEKernel


class ReferenceRoPE(RoPEKernel):
    kernel_id = "reference_rope"
    function = "fuseplug_rope.reference:rope"


@pytest.fixture(name="manager")
def _manager():
    return manager_of(ReferenceRoPE)
