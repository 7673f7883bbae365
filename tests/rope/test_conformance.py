"""The kernel passes the conformance kit, as every kernel has to."""

from __future__ import annotations

from fuseplug.testing import check_kernel
from fuseplug_rope.kernels import InductorRoPEKernel


def test_inductors_kernel_is_right_in_every_way_the_kit_knows():
    result = check_kernel(InductorRoPEKernel)
    assert result.device == "cpu" or InductorRoPEKernel().unavailable("cpu")
