"""The code on the page about kernels in Triton compiles for a GPU, and takes what the page says."""

from pathlib import Path

from support.page import import_page
from test_docs import IN_TRITON


def test_its_test_passes(tmp_path):
    import_page(Path(__file__).parents[3] / "docs" / IN_TRITON, tmp_path).test_registers()
