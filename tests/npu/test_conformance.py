"""Every NPU kernel passes the conformance kit."""

from __future__ import annotations

import pytest
from support.conformance import check_some


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("op", ["rmsnorm", "swiglu", "rope", "moe"])
def test_the_kernel_passes(host_npu, op):
    assert check_some(f"npu_fused_{op}").device == "npu"
    assert host_npu.calls
