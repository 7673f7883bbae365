"""The kernels that run on the CPU pass the conformance kit."""

import os

import pytest
from support.conformance import check_some, some

from fuseplug_backends.inductor.kernel import cpp_compiler


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(("op", "every"), some(set(), every=8))
def test_the_kernel_passes(op, every):
    assert check_some(f"inductor_fused_{op}", every).device == ("cpu" if cpp_compiler(os.environ) else None)
