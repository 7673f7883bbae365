"""A kernel whose function is the reference, so that what is found can be tested without computing in chunks."""

from __future__ import annotations

import pytest
from support.managers import manager_of

from fuseplug_ssd.kernels import SSDKernel


class ReferenceSSD(SSDKernel):
    kernel_id = "reference_ssd"
    function = "fuseplug_ssd.reference:ssd"
    check_sizes = (1 << 7,)


@pytest.fixture(name="manager")
def _manager():
    return manager_of(ReferenceSSD)
