"""The code on the page about testing without an NPU works, and so does the code on the pages in Chinese."""

import sys
import types
from pathlib import Path

import pytest
from support.thorough import thorough
from test_docs import IN_CHINESE, LONG, NEEDS_AN_NPU, blocks, run_page

from fuseplug_host_npu.references import references

PAGE = Path(__file__).parents[2] / "docs" / NEEDS_AN_NPU


def test_the_python_of_the_page_runs_from_top_to_bottom(host_npu, monkeypatch, capsys):
    monkeypatch.setitem(references(), "npu::npu_mish", None)  # so that the page's entry is gone afterwards
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = blocks(PAGE)
    for number, block in enumerate(found):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), module.__dict__)
    printed = capsys.readouterr().out.splitlines()
    promised = [line.partition("# ")[2] for block in found for line in block.splitlines() if line.startswith("# npu")]
    assert printed[:2] == ["1", *promised]


def test_its_tests_pass(host_npu):
    module = types.ModuleType("page")
    exec(blocks(PAGE)[0], module.__dict__)
    module.test_numbers(host_npu)


def test_its_tests_without_values_pass(fake_npu):
    module = types.ModuleType("page")
    exec(blocks(PAGE)[0], module.__dict__)
    module.test_shapes_and_limits(fake_npu)


@thorough
@pytest.mark.usefixtures("host_npu", "small_checks")
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in IN_CHINESE if blocks(page, LONG)])
def test_the_python_of_a_page_in_chinese_runs_from_top_to_bottom(page, monkeypatch):
    run_page(page, LONG, monkeypatch)
