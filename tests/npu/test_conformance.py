"""Every NPU kernel passes the conformance kit."""

from __future__ import annotations

import pytest
from support.conformance import check_some
from support.thorough import thorough


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("every", [pytest.param(1000, id="one specimen"), pytest.param(8, id="some", marks=thorough)])
@pytest.mark.parametrize("op", ["rmsnorm", "swiglu", "rope", "moe"])
def test_the_kernel_passes(host_npu, op, every):
    assert check_some(f"npu_fused_{op}", every).device == "npu"
    assert host_npu.calls
