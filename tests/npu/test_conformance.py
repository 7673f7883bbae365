"""Every NPU kernel passes the conformance kit, in every variant that it does not decline."""

from __future__ import annotations

import pytest

from fuseplug import KernelManager
from fuseplug.hookspecs import resolve
from fuseplug.testing import check_kernel

DECLINED = {
    "npu_fused_rmsnorm": 0,
    "npu_fused_swiglu": 7,  # relu; relu² and clamped after, twice each; sigmoid; quick_gelu
    "npu_fused_rope": 0,
    "npu_fused_moe": 0,
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("kernel_id", DECLINED)
def test_the_kernel_passes(host_npu, kernel_id):
    (kernel,) = (record.kernel for record in KernelManager(environ={}).kernels() if record.kernel_id == kernel_id)
    result = check_kernel(kernel)
    assert result.device == "npu"
    assert any(host_npu.calls[op] for op in kernel.ops)
    declined = {skip.where for skip in result.skipped if skip.why.startswith("declined")}
    assert len(declined) == DECLINED[kernel_id]
    assert result.passed["specimens"] == len(resolve(kernel.specimens)()) - len(declined)
