"""Triton kernels pass the conformance kit, here on one specimen, without the large sizes: the interpreter is slow."""

import pytest
from support.conformance import OPS, check_some


# One specimen of swiglu takes the interpreter a quarter of an hour. tests/swiglu asks for its numbers, with small rows.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("op", [op for op in OPS if op != "swiglu"])
def test_the_kernel_passes(device, op):
    assert check_some(f"triton_fused_{op}", None).device == device
