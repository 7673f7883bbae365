"""The code on the page about kernels in Triton works."""

import pytest
from support.page import import_page
from support.thorough import thorough
from test_docs import DOCS, IN_TRITON, blocks, run_page

from fuseplug.discovery.kernel_faults import faults
from fuseplug_testing import check_kernel

PAGE = DOCS / IN_TRITON


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return import_page(PAGE, tmp_path_factory.mktemp("page"))


def test_its_tests_pass(device, page):
    if device != "cpu":
        pytest.skip("the page has its tensors on the CPU, for Triton's interpreter")
    page.test_numbers()
    page.test_one_graph()


@pytest.fixture
def kernel(page, monkeypatch):
    """The kernel that the page declares, with its function, on the base from the page that it continues."""
    before = run_page(DOCS / "write-a-kernel.md", "python", monkeypatch)
    (declared,) = blocks(PAGE, "py")
    names = {"ReLU2Kernel": before.FusedReLU2}
    exec(declared, names)
    return type("Kernel", (names["TritonReLU2"],), {"function": f"{page.__name__}:fused_relu2"}), before.ReLUSquared()


def test_what_it_declares_is_a_kernel(kernel):
    assert faults(kernel[0]) == []
    assert {"cuda", "xpu"} <= set(kernel[0].device_types)


@thorough  # takes half a minute in the interpreter
def test_it_passes_the_kit(device, kernel):
    kernel, specimen = kernel
    assert check_kernel(kernel, [specimen], device=device).passed["special-values"]
