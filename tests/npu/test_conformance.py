"""The NPU kernels pass the conformance kit."""

import pytest
from support.conformance import check_some, some


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(("op", "every"), some({"rope"}, every=8))
def test_the_kernel_passes(host_npu, op, every):
    assert check_some(f"npu_fused_{op}", every).device == "npu"
    assert host_npu.calls
