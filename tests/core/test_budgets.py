"""Budgets for code, for names, and for imports that run the wrong way. A budget may only fall.

A change that leaves a budget too high must lower it: the test fails until then. Only the mend of a fault may raise the
budget of an op, by a few lines, as long as the op is below the aim.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.house import is_private, lines_of_code

import fuseplug_verify

from .test_architecture import SOURCES, Private, imports, parsed

ROOT = Path(__file__).parents[2]
SLACK = 0.02
"""The share of a budget that may be unused, so that the test does not fail for one line less."""

LINES = {
    "core/src": 4695,
    "core/verify/src": 3885,
    "core/tools/src": 2964,
    "kernel-packages/backends/src": 1496,
    "kernel-packages/causal-conv1d/src": 395,
    "kernel-packages/gated-delta-rule/src": 708,
    "kernel-packages/liger/src": 515,
    "kernel-packages/linear-cross-entropy/src": 3171,
    "kernel-packages/moe/src": 3862,
    "kernel-packages/rmsnorm/src": 1187,
    "kernel-packages/rope/src": 1974,
    "kernel-packages/selective-scan/src": 535,
    "kernel-packages/ssd/src": 712,
    "kernel-packages/swiglu/src": 1342,
}
"""Lines of code of each distribution. The aims: core 3,800, verify 3,500, tools 2,900, backends 1,500; an op 2,000, but
moe 3,900 and linear-cross-entropy 3,200."""

PRIVATE_NAMES_OF_TORCH = 47
"""The number of different full names, in all distributions together."""

WRONG_WAY = 0
"""The aim: none."""

NAMES_AT_THE_DOOR = 25
"""The number of names in `fuseplug_verify.__all__`."""

MAY_IMPORT = {
    "fuseplug_verify": (),
    "fuseplug": ("fuseplug_verify",),
    "fuseplug_tools": ("fuseplug", "fuseplug_verify", "fuseplug_testing"),
    "fuseplug_backends": ("fuseplug",),
    "fuseplug_testing": ("fuseplug", "fuseplug_verify", "fuseplug_backends"),
}
"""The packages that a package may import. A kernel package has no entry: it may import all but `NOT_FOR_KERNELS`."""
NOT_FOR_KERNELS = ("fuseplug_verify", "fuseplug_tools", "fuseplug_testing", "fuseplug_host_npu")
FRONT_DOORS = ("fuseplug_verify",)
"""Packages whose names others import from the package itself, never from a module below it."""


def within(measured: int, budget: int, what: str) -> None:
    assert measured <= budget, f"{what}: {measured}, which is more than its budget of {budget}: make it smaller"
    assert measured >= budget * (1 - SLACK) - 5, f"{what} is down to {measured}: lower its budget of {budget} to that"


def wrong_way(source: Path) -> Iterator[str]:
    """Yield the imports in *source* that run the wrong way."""
    for path in sorted(source.rglob("*.py")):
        package = path.relative_to(source).parts[0]
        for module, imported, _ in imports(path, source, types=True):
            name = f"{module}.{imported}" if imported else module
            first, *below = name.split(".")
            if first == package or not first.startswith("fuseplug"):
                continue
            allowed = first in MAY_IMPORT[package] if package in MAY_IMPORT else first not in NOT_FOR_KERNELS
            deep = first in FRONT_DOORS and len(below) > 1
            if not allowed or deep or is_private(name) or "torch_private" in name:
                yield f"{path.relative_to(source)} imports {name}"


@pytest.mark.parametrize("source", LINES)
def test_no_distribution_grows(source):
    within(lines_of_code(ROOT / source), LINES[source], f"lines of code of {source}")


def test_every_distribution_has_a_budget():
    assert {str(source.relative_to(ROOT)) for source in SOURCES if "tests" not in source.parts} == set(LINES)


def test_private_names_of_torch_become_fewer():
    names = {
        name
        for source in SOURCES
        if "tests" not in source.parts
        for path in source.rglob("*.py")
        for name in Private(parsed(path.read_text())).found
    }
    within(len(names), PRIVATE_NAMES_OF_TORCH, "private names of torch")


def test_the_door_becomes_narrower():
    within(len(fuseplug_verify.__all__), NAMES_AT_THE_DOOR, "names at the door of fuseplug_verify")


def test_arrows_run_one_way():
    found = [breach for source in SOURCES for breach in wrong_way(source)]
    assert len(found) == WRONG_WAY, "\n".join(found)


@pytest.mark.parametrize(
    ("package", "text", "count"),
    [
        ("fuseplug_verify", "from fuseplug import Site", 1),
        ("fuseplug", "from fuseplug_backends import functional", 1),
        ("fuseplug", "from fuseplug_verify import examine", 0),
        ("fuseplug", "from fuseplug_verify.reading import names", 1),
        ("fuseplug_new", "from fuseplug_verify import examine", 1),
        ("fuseplug_new", "from fuseplug_backends.triton import operation", 0),
        ("fuseplug_new", "from fuseplug_backends.torch_private import FakeTensor", 1),
        ("fuseplug_new", "def late():\n    from fuseplug._hidden import x", 1),
    ],
)
def test_wrong_way_finds_a_planted_breach(tmp_path, package, text, count):
    (tmp_path / package).mkdir()
    (tmp_path / package / "planted.py").write_text(text)
    assert len([*wrong_way(tmp_path)]) == count


@pytest.mark.parametrize("measured", [101, 80])
def test_a_budget_holds_both_ways(measured):
    with pytest.raises(AssertionError):
        within(measured, 100, "lines")


def test_comments_and_documentation_cost_nothing(tmp_path):
    path = tmp_path / "one.py"
    path.write_text(
        '"""Doc\nof two lines."""\n\n# why\nx = (\n    1,\n)  # so\n\n\ndef f():\n    "doc"\n    return 1\n'
    )
    assert lines_of_code(path) == 5
