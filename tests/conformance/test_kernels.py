"""Every kernel that is run on the CPU passes the conformance kit."""

from __future__ import annotations

import os

import pytest
from support.conformance import check_some
from support.thorough import first_quick, thorough

from fuseplug.inductor.kernel import cpp_compiler


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("every", [pytest.param(1000, id="one specimen"), pytest.param(8, id="some", marks=thorough)])
@pytest.mark.parametrize("op", first_quick(["moe", "swiglu", "rope", "rmsnorm"], 2))
def test_the_kernel_passes(op, every):
    assert check_some(f"inductor_fused_{op}", every).device == ("cpu" if cpp_compiler(os.environ) else None)
