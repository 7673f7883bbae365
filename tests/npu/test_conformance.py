"""Every NPU kernel passes the conformance kit.

On every fourth specimen, for each takes seconds here and every variant has tests of its own. All of them:
``pytest --fuseplug-host-npu --fuseplug-kernel npu_fused_moe``.
"""

from __future__ import annotations

import pytest

from fuseplug import KernelManager
from fuseplug.hookspecs import resolve
from fuseplug.testing import check_kernel
from fuseplug.testing.kit import CHECKS

KERNELS = ("npu_fused_rmsnorm", "npu_fused_swiglu", "npu_fused_rope", "npu_fused_moe")


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("kernel_id", KERNELS)
def test_the_kernel_passes(host_npu, kernel_id):
    (kernel,) = (record.kernel for record in KernelManager(environ={}).kernels() if record.kernel_id == kernel_id)
    specimens = resolve(kernel.specimens)()[::4]
    checks = [check.name for check in CHECKS if check.name != "variants"]  # which wants every one of them
    result = check_kernel(kernel, specimens, checks=checks)
    assert result.device == "npu"
    assert any(host_npu.calls[op] for op in kernel.ops)
    declined = {skip.where for skip in result.skipped if skip.why.startswith("declined")}
    assert result.passed["specimens"] == len(specimens) - len(declined)
