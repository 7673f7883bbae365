"""Everything published for API 1 keeps working, and the documentation lists everything public."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_docs import LONG, blocks

import fuseplug
import fuseplug_verify
from fuseplug import BaseKernel, KernelManager
from fuseplug.discovery.kernel_faults import faults
from fuseplug_testing import public_names
from fuseplug_tools.new.known_ops import KNOWN_OPS
from fuseplug_tools.new.request import BACKENDS, request_of
from fuseplug_tools.new.writing import render

ROOT = Path(__file__).parents[2]
FROZEN = ROOT / "tests" / "frozen" / "api1"
PAGE = ROOT / "docs" / "compatibility.md"


@pytest.fixture
def frozen(site, distribution):
    """A manager that finds the frozen distribution installed."""
    project = (FROZEN / "pyproject.toml").read_text()
    _, _, entries = project.partition('[project.entry-points."fuseplug.kernels"]\n')
    requires = json.loads(re.search(r"^dependencies = (.*)$", project, re.MULTILINE)[1])
    extra, needed = re.search(r"^\[project.optional-dependencies\]\n(\w+) = (.*)$", project, re.MULTILINE).groups()
    requires += [f"{line}; extra == '{extra}'" for line in json.loads(needed)]
    shutil.copytree(FROZEN / "src" / "frozen_relu2", site / "frozen_relu2")
    distribution("frozen-relu2", entry_points=entries.partition("\n\n")[0].replace('"', ""), requires=requires)
    return KernelManager({"FUSEPLUG_ALLOW": "frozen-relu2"})


class TestFrozen:
    def test_its_kernels_are_found(self, frozen):
        records = {record.kernel_id: record for record in frozen.kernels() if record.distribution == "frozen-relu2"}
        states = {kernel_id: record.state for kernel_id, record in records.items()}
        assert states.pop("frozen_relu2_npu") in ("ready", "not installed")
        assert states == dict.fromkeys(
            ["frozen_relu2", "frozen_relu2_inductor", "frozen_soft_cap", "frozen_tail", "frozen_doubled"], "ready"
        )
        costs = [cost for record in records.values() for cost in record.import_costs]
        assert not [cost for cost in costs if " takes " not in cost]
        assert {record.kernel.api for record in records.values() if record.kernel} == {1}

    def test_they_compute_what_they_did(self, frozen):
        """The kernels use proposals, rejections, scopes, consent, `beside`, `unsupported` and `gains_from`."""
        self.fused_and_right(frozen)

    @pytest.mark.thorough
    def test_they_compute_what_they_did_compiled(self, everything_compiled, frozen):
        self.fused_and_right(frozen)

    def fused_and_right(self, frozen):
        frozen.kernels()
        from frozen_relu2.mathematics import ran
        from frozen_relu2.specimens import Model

        model, x, labels = Model(), torch.randn(40, 16, requires_grad=True), torch.arange(40) % 16
        expected = model(x, labels=labels)
        wanted = torch.autograd.grad(expected[1], [x, *model.parameters()])
        applied = frozen.apply_all(model, allow="other_sums", every_size=False)
        fused = {(e.paths[0], str(e.target), e.kernel_id, e.variant) for e in applied.report.fused}
        assert fused == {
            ("", "tail.forward", "frozen_tail", "projection"),
            ("scaled", "forward", "frozen_relu2", "plain"),
            ("biased", "forward", "frozen_relu2_inductor", "biased"),
            ("scores", "forward:soft_cap", "frozen_soft_cap", "tanh"),
            ("twice", "forward", "frozen_doubled", "positive"),
            ("twice", "double", "frozen_doubled", "all"),
        }
        assert ["it is cubed: square it" in entry.why_not for entry in applied.report.left_alone] == [True]
        declined = [e.rejections for e in applied.report.entries if e.paths == ("biased",)]
        assert any("it adds no bias" in why.reason for rejections in declined for _, why in rejections)
        ran.clear()
        found = model(x, labels=labels)
        assert ran == ["frozen_relu2", "frozen_relu2_inductor", "frozen_soft_cap", "frozen_doubled", "frozen_tail"]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found[1], [x, *model.parameters()]), wanted)
        ran.clear()
        model(x)  # outside the scope
        assert "frozen_tail" not in ran
        applied.undo()
        assert torch.equal(model(x, labels=labels)[0], expected[0])

    def test_they_are_small_where_they_do_not_gain(self, frozen, monkeypatch):
        monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
        frozen.kernels()
        from frozen_relu2.mathematics import ran
        from frozen_relu2.specimens import Scaled

        model = Scaled()
        frozen.apply("frozen_relu2", model)
        for rows, computed in ((1, ["frozen_relu2"]), (2, []), (40, ["frozen_relu2"])):
            ran.clear()
            model(torch.randn(rows, 16, requires_grad=True))
            assert ran == computed


class TestLater:
    def kernel(self, **declared):
        body = {"kernel_id": "k", "op": "o", "function": "a:b", "reference": "a:b", "match": lambda self, site: None}
        return type("Later", (BaseKernel,), {**body, **declared})

    @pytest.mark.parametrize(
        ("api", "why"),
        [
            (2, "it was written for API 2 of kernels, and this Fuseplug has API 1: pip install --upgrade fuseplug"),
            (0, "api must be the version of the contract that the kernel was written for, 1 or later, not 0"),
            ("1", "not '1'"),
            (True, "not True"),
        ],
    )
    def test_another_api_is_a_fault(self, api, why):
        (found,) = faults(self.kernel(api=api, op=None))  # op=None is a fault, too, but only the API is reported
        assert why in found
        assert faults(self.kernel(api=1)) == faults(self.kernel()) == []

    def test_it_is_a_row_and_never_asked(self, package):
        text = (
            "from fuseplug import BaseKernel\n"
            "class Kernel(BaseKernel):\n"
            "    api = 2\n    kernel_id = 'later'\n    op = function = reference = 'a:b'\n"
            "    def __init__(self): raise AssertionError('made')\n"
            "    def match(self, site): raise AssertionError('asked')\n"
        )
        package("x-later", "later", source=text)
        manager = KernelManager({"FUSEPLUG_ALLOW": "x-later"})
        report = manager.apply_all(torch.nn.Linear(1, 1)).report
        (record,) = [record for record in report.records if record.kernel_id == "later"]
        assert (record.state, record.reason.partition(",")[0]) == (
            "broken",
            "it was written for API 2 of kernels",
        )
        assert report.entries == []


# --- what is public


def written_down() -> dict[str, set[str]]:
    """The names that the page lists as public, by module."""
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}


@pytest.mark.parametrize("module", written_down())
def test_the_page_lists_what_is_public(module):
    assert written_down()[module] == public_names.names(module)
    there = importlib.import_module(module)
    assert set(there.__all__) == public_names.names(module)
    assert all(hasattr(there, name) for name in there.__all__)


def test_the_page_lists_the_public_modules():
    assert list(written_down()) == list(public_names.MODULES)
    packages = {path.name for path in ROOT.glob("kernel-packages/*/src/*")}
    assert packages | {"fuseplug", "fuseplug_tools", "fuseplug_testing", "fuseplug_host_npu"} == public_names.OURS


def test_the_page_lists_what_is_public_of_the_library():
    """`__all__` also has names for this project's own distributions, so it does not say what is promised."""
    (paragraph,) = re.findall(r"^Of `fuseplug_verify` .*?\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    reference = (ROOT / "docs" / "reference" / "verify.md").read_text()
    promised = set(re.findall(r"^\.\. auto\w+:: (\w+)$", reference, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", paragraph)) - {"fuseplug_verify"} == promised
    assert promised < set(fuseplug_verify.__all__)


OWN_SCRIPTS = {"docs/demo": {"fuseplug_tools.bench"}, "docs/examples": {"fuseplug_tools.doctor"}}
"""Private modules that the scripts in these folders may use, because they run from the same checkout."""


def what_others_read() -> Iterator[tuple[str, str]]:
    """Yield the Python code that a third party copies or starts from, as pairs of place and text."""
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*/README.md")):
        for number, block in enumerate(blocks(page, LONG)):
            yield f"{page.relative_to(ROOT)}, block {number + 1}", block
    for path in ROOT.glob("docs/**/*.py"):
        yield str(path.relative_to(ROOT)), path.read_text()
    for op in ("", *KNOWN_OPS):
        for backend in BACKENDS:
            for path, text in render(
                request_of("my-op", op=op, backend=backend, params="" if op else "weight")
            ).items():
                if path.suffix == ".py":
                    yield f"fuseplug new --op {op} --backend {backend}: {path}", text
    for path in FROZEN.rglob("*.py"):
        yield str(path.relative_to(ROOT)), path.read_text()


def test_what_others_read_uses_public_names_only():
    read = dict(what_others_read())
    assert len(read) > 100
    for where, text in read.items():
        own = {name for folder, names in OWN_SCRIPTS.items() if where.startswith(folder) for name in names}
        assert [str(each) for each in public_names.private_names(text) if each.module not in own] == [], where


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "from fuseplug.contract import Site",
            "Site of fuseplug.contract is private to Fuseplug, .*: import Site from fuseplug$",
        ),
        ("from fuseplug import planning", "planning of fuseplug is private"),
        ("import fuseplug.planning", "fuseplug.planning is private .*: docs/compatibility.md lists"),
        ("import fuseplug\nfuseplug.patching.put_on", "patching of fuseplug is private"),
        (
            "import fuseplug_backends.inductor as i\ndef f(): return i.compiled.SMALL",
            "compiled of fuseplug_backends.inductor is private",
        ),
        ("from fuseplug_rmsnorm import reference\nreference.unit(1)", "unit of fuseplug_rmsnorm.reference is private"),
        (
            "from fuseplug_rope.recognise.adapters import MethodAdapter",
            "MethodAdapter of fuseplug_rope.recognise.adapters",
        ),
        ("from fuseplug_testing.checks import CHECKS", "CHECKS of fuseplug_testing.checks is private"),
    ],
)
def test_a_private_name_is_found(text, found):
    (each,) = public_names.private_names(text)
    assert re.search(found, str(each)), each


@pytest.mark.parametrize(
    "text",
    [
        "import fuseplug\nfuseplug.manager.plan, fuseplug.__version__",
        "import fuseplug_tools.integrations.kernelize\nfuseplug_tools.integrations.kernelize.kernel_mapping",
        "from fuseplug_backends import triton as t\nt.vjp.anything",
        "from fuseplug_layernorm.contract import Site\nfrom .contract import Site",
        "from fuseplug_rmsnorm import reference\nother.reference.unit",
    ],
)
def test_a_public_name_is_not(text):
    assert public_names.private_names(text) == []


def test_a_kernel_of_a_script_is_in_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_script", types.ModuleType("a_script"))
    assert [*public_names.used_by("a_script")] == []


def parameters(thing) -> list[tuple[str, str, bool]]:
    return [
        (each.name, each.kind.name, each.default is not each.empty)
        for each in inspect.signature(thing).parameters.values()
    ]


def signatures() -> dict[str, list[tuple[str, str, bool]]]:
    """The parameters of every public function, class and method, by dotted name."""
    found = {}
    for module, names in written_down().items():
        for name in sorted(names):
            thing = getattr(importlib.import_module(module), name)
            if not callable(thing):
                continue
            methods = inspect.getmembers(thing) if inspect.isclass(thing) else ()
            public = {f".{n}": m for n, m in methods if not n.startswith("_") and inspect.isfunction(m)}
            for suffix, each in {"": thing, **public}.items():
                try:
                    found[f"{module}:{name}{suffix}"] = parameters(each)
                except ValueError:  # an exception class may have no signature
                    continue
    return found


def broken_promises(before, now) -> list[str]:
    """The ways in which *now* refuses calls that *before* took."""
    found = []
    for name, were in before.items():
        if name not in now:
            found.append(f"{name} is gone")
            continue
        there = {each: (kind, default) for each, kind, default in now[name]}
        for each, kind, default in were:
            if each not in there:
                found.append(f"{name} no longer has {each}")
            elif there[each][0] != kind or (default and not there[each][1]):
                found.append(f"{name} takes {each} otherwise")
        positional = [each for each, kind, _ in were if kind.startswith("POSITIONAL")]
        if [each for each, kind, _ in now[name] if kind.startswith("POSITIONAL")][: len(positional)] != positional:
            found.append(f"{name} has its parameters in another order")
        known = {each for each, *_ in were}
        added = [each for each, kind, default in now[name] if each not in known and not default and "VAR" not in kind]
        found += [f"{name} needs {each}" for each in added]
    return found


def test_what_was_public_takes_what_it_took():
    before = json.loads((FROZEN / "signatures.json").read_text())
    assert len(before) > 60
    assert broken_promises(before, signatures()) == []


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ({}, "f is gone"),
        ({"f": [("b", "POSITIONAL_OR_KEYWORD", True)]}, "f no longer has a"),
        ({"f": [("a", "POSITIONAL_OR_KEYWORD", False), ("b", "KEYWORD_ONLY", True)]}, "f takes b otherwise"),
        ({"f": [("a", "POSITIONAL_OR_KEYWORD", False), ("b", "POSITIONAL_OR_KEYWORD", False)]}, "f takes b otherwise"),
        ({"f": [("b", "POSITIONAL_OR_KEYWORD", True), ("a", "POSITIONAL_OR_KEYWORD", True)]}, "in another order"),
        (
            {
                "f": [
                    ("a", "POSITIONAL_OR_KEYWORD", False),
                    ("b", "POSITIONAL_OR_KEYWORD", True),
                    ("c", "KEYWORD_ONLY", False),
                ]
            },
            "f needs c",
        ),
    ],
)
def test_a_broken_promise_is_found(now, why):
    before = {"f": [("a", "POSITIONAL_OR_KEYWORD", False), ("b", "POSITIONAL_OR_KEYWORD", True)]}
    assert broken_promises(before, before) == []
    assert any(why in each for each in broken_promises(before, now))


def test_the_rule_for_versions_is_that_of_the_code():
    assert fuseplug.hookspecs.NEWEST_API == BaseKernel.api == 1
    assert f"`api = {BaseKernel.api}`" in PAGE.read_text()
