"""A kernel whose function is the reference, so that what is found can be tested without computing in chunks."""

from __future__ import annotations

import pytest
from support.managers import manager_of

from fuseplug_selective_scan.kernels import SelectiveScanKernel


class ReferenceScan(SelectiveScanKernel):
    kernel_id = "reference_selective_scan"
    function = "fuseplug_selective_scan.reference:selective_scan"
    check_sizes = (1 << 7,)


@pytest.fixture(name="manager")
def _manager():
    return manager_of(ReferenceScan)
