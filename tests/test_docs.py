"""The code on the pages works."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from _pytest.mark import ParameterSet
from support.thorough import thorough
from torch import nn

from fuseplug import BaseKernel
from fuseplug_testing import check_kernel

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NEEDS_AN_NPU = "test-without-an-npu.md"  # the tests of NPUs run it
IN_TRITON = "write-a-triton-kernel.md"  # the tests of GPUs run it
LONG = "(?:python|python thorough)"  # blocks that compile are marked after the language; readers do not see it
IN_CHINESE = sorted((*ROOT.glob("*.zh-CN.md"), *DOCS.glob("zh/*.md")))  # about NPUs, whose tests run these pages
PAGES = sorted(page for page in DOCS.glob("*.md") if page.name not in (NEEDS_AN_NPU, IN_TRITON))


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def _pages() -> Iterator[ParameterSet]:
    for page in PAGES:
        if blocks(page):
            yield pytest.param(page, "python", id=page.stem)
        if blocks(page, "python thorough"):
            yield pytest.param(page, LONG, id=f"{page.stem}, all of it", marks=pytest.mark.thorough)


def run_page(page: Path, language: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, block in enumerate(blocks(page, language)):
        name = f"{page.name}, block {number + 1}"
        # As a notebook does, so that the source of functions and classes in the block can be read.
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
        exec(compile(block, name, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(("page", "language"), list(_pages()))
def test_the_python_of_a_page_runs_from_top_to_bottom(page, language, monkeypatch):
    run_page(page, language, monkeypatch)


def called_with_labels(page: types.ModuleType) -> nn.Module:
    """The model of the page about losses, with an example of its call: a kernel with a scope needs that."""

    class Called(page.Model):
        dummy_inputs: ClassVar = {"x": torch.linspace(-1, 1, 32).view(4, 8), "labels": torch.arange(4)}

    return Called()


KERNELS = {
    "a-norm-with-a-weight": {"PlainLayerNorm": None, "InductorLayerNorm": None},
    "an-op-that-spans-modules": {"FusedAddNorm": lambda page: page.Layer(8), "FusedLoss": called_with_labels},
    "test-a-kernel": {"FusedReLU2": None},
    "write-a-kernel": {
        "FusedMLP": lambda page: page.MLP(16, 32),
        "FusedReLU2": lambda page: page.ReLUSquared(),
        "FusedSoftCap": lambda page: page.Scores(),
        "InductorReLU2": lambda page: page.ReLUSquared(),
    },
}
"""The kernels on each page, each with a function that makes a specimen, or ``None`` if it declares specimens."""

NOT_WHOLE = {
    "LayerNormKernel": "is the base of others",
    "CarelessReLU2": "is wrong, and the page shows that the kit says so",
    "MyRMSNorm": "names a function that the reader is to write",
}


@thorough
@pytest.mark.parametrize(
    ("page", "kernel"), [(page, kernel) for page, kernels in KERNELS.items() for kernel in kernels]
)
def test_a_kernel_of_a_page_passes_the_kit(page, kernel, monkeypatch):
    module = run_page(DOCS / f"{page}.md", "python", monkeypatch)
    found = {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, BaseKernel) and value.__module__ == module.__name__
    }
    assert found - NOT_WHOLE.keys() == KERNELS[page].keys()
    specimen = KERNELS[page][kernel]
    result = check_kernel(getattr(module, kernel), None if specimen is None else [specimen(module)])
    assert {"numbers", "gradients", "special-values", "layouts", "compile"} - {"compile"} <= result.passed.keys()


def test_every_page_with_kernels_goes_through_the_kit():
    declaring = {page.stem for page in PAGES if any("kernel_id = " in block for block in blocks(page))}
    assert declaring == {*KERNELS, "backends"}  # that page names functions that the reader writes


def test_there_is_a_page_to_run():
    assert any(blocks(page) for page in PAGES)


def test_the_pages_with_figures_say_what_the_results_say(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "benchmarks"))
    import page as figures

    assert figures.PAGE.read_text() == figures.page(), "run tests/benchmarks/page.py"
    assert figures.PAGE_OF_GPUS.read_text() == figures.page_of_gpus(), "run tests/benchmarks/page.py"


@pytest.fixture(scope="module")
def strings() -> set[str]:
    """Every string in the code of the distributions, with … in place of each value of an f-string."""
    found = set()
    for path in (*ROOT.glob("core/**/src/**/*.py"), *ROOT.glob("kernel-packages/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


MESSAGES = {
    message
    for page in ("troubleshooting.md", "zh/troubleshooting.md")
    for message in re.findall(r"^\| `(.+?)` \|", (DOCS / page).read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("message", sorted(MESSAGES))
def test_a_message_that_is_explained_is_one_that_the_code_has(message, strings):
    assert any(message in string for string in strings)
