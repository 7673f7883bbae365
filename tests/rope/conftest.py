"""A RoPE kernel whose function is the reference, so that what is found can be tested without compiling anything."""

from __future__ import annotations

import pytest

from fuseplug import KernelManager
from fuseplug_rope.kernels import RoPEKernel


class ReferenceRoPE(RoPEKernel):
    kernel_id = "reference_rope"
    function = "fuseplug_rope.reference:rope"


@pytest.fixture(name="manager")
def _manager():
    manager = KernelManager(environ={"FUSEPLUG_KERNELS": "reference_rope"})
    manager.register(ReferenceRoPE)
    return manager
