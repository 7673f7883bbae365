"""RMSNorm passes the conformance kit, as every kernel has to."""

from __future__ import annotations

import pytest

from fuseplug.testing import check_kernel
from fuseplug_rmsnorm.kernels import InductorRMSNormKernel
from fuseplug_rmsnorm.reference import VARIANTS


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_inductors_kernel_is_right_in_every_way_the_kit_knows():
    result = check_kernel(InductorRMSNormKernel)
    assert result.passed["variants"] == len(VARIANTS)
    assert result.device == "cpu" or InductorRMSNormKernel().unavailable("cpu")
