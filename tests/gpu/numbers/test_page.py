"""The code on the page about kernels in Triton works."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.page import import_page
from test_docs import IN_TRITON, blocks

PAGE = Path(__file__).parents[3] / "docs" / IN_TRITON


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return import_page(PAGE, tmp_path_factory.mktemp("page"))


def test_its_tests_pass(device, page):
    page.test_numbers()
    page.test_one_graph()


def test_what_it_declares_is_a_kernel(page):
    from fuseplug import BaseKernel
    from fuseplug.kernel_faults import faults
    from fuseplug.triton import TritonKernel

    class ReLU2Kernel(BaseKernel):
        op = "relu2"
        reference = "page_write_a_triton_kernel:relu2"

        def match(self, site):
            return None

    (declared,) = blocks(PAGE, "py")
    names = {"TritonKernel": TritonKernel, "ReLU2Kernel": ReLU2Kernel}
    exec(declared, names)
    assert faults(names["TritonReLU2"]) == []
    assert {"cuda", "xpu"} <= set(names["TritonReLU2"].device_types)
