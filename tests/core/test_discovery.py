"""Installed kernels, in every state that they can be in."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest
from support.fixtures import KERNEL, write_distribution
from torch import nn

from fuseplug import BaseKernel, DiscoveryError, KernelManager
from fuseplug.discovery import discover, elsewhere
from fuseplug.discovery.records import KernelRecord


def source(kernel_id: str, extra: str = "") -> str:
    return KERNEL.format(kernel_id) + "\n" + textwrap.indent(extra, "    ") + "\n"


def find(prefix: str = "x-", **environ: str) -> dict[str, KernelRecord]:
    """The records of the test's own distributions, and of kernels that the environment names in vain."""
    variables = {f"FUSEPLUG_{name.upper()}": value for name, value in environ.items()}
    return {r.name: r for r in discover(variables) if r.distribution.startswith(prefix) or not r.distribution}


def manager(**environ: str) -> KernelManager:
    return KernelManager({f"FUSEPLUG_{name.upper()}": value for name, value in environ.items()})


def test_good(package):
    package("x-good", "good")
    record = find()["x-good:good"]
    assert (record.state, record.reason, record.version, record.value) == ("ready", "", "1.0", "x_good:Kernel")
    assert isinstance(record.kernel, BaseKernel)
    assert record.to_dict()["id"] == "good"


@pytest.mark.parametrize(
    ("text", "named", "traced"),
    [
        ("import does_not_exist", "ModuleNotFoundError: No module named 'does_not_exist'", "import does_not_exist"),
        ("from math import nothing", "ImportError: cannot import name 'nothing'", "from math import nothing"),
        ("def Kernel(:", "SyntaxError: invalid syntax", "def Kernel(:"),
        ("1 / 0", "ZeroDivisionError: division by zero", "1 / 0"),
        ("raise SystemExit(3)", "SystemExit: 3", "raise SystemExit(3)"),
    ],
    ids=["module", "name", "syntax", "any", "exit"],
)
def test_broken_on_import_is_a_record_with_its_traceback(package, text, named, traced):
    package("x-broken", "broken", source=text)
    package("x-good", "good")
    found = find()
    assert found["x-broken:broken"].state == "broken"
    assert named in found["x-broken:broken"].reason
    assert found["x-broken:broken"].reason.endswith("(its entry point names x_broken:Kernel)")
    assert traced in found["x-broken:broken"].traceback
    assert found["x-good:good"].state == "ready"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Kernel = None", "None is not a subclass of fuseplug.BaseKernel"),
        ("Kernel = 'text'", "'text' is not a subclass"),
        ("def Kernel(): ...", "is not a subclass"),
        ("class Kernel: ...", "is not a subclass"),
        (source("another"), "its kernel_id is 'another', its entry point is named 'odd': make them equal"),
        (source("odd").partition("    def match")[0], "nothing recognises modules: name a recogniser"),
        (source("odd", "device_types = 'npu'"), "device_types must be a tuple of strings, not 'npu'"),
        (source("odd", "priority = True"), "priority must be an int, not True"),
        (source("odd", "op = ''"), "op must be a non-empty string"),
        (source("odd", "function = 'math.sqrt'"), 'function must be "package.module:function"'),
        (source("odd", "def propose(self, site): ..."), "propose() is final: write match() instead"),
        (source("odd", "def __init__(self): raise OSError('no chip')"), "OSError: no chip"),
        (source("odd", "@property\ndef differentiable(self): raise OSError"), "differentiable must be True or False"),
        (source("odd", "device_types = property()"), "device_types must be a tuple of strings"),
    ],
)
def test_not_a_proper_kernel(package, text, reason):
    package("x-odd", "odd", source=text)
    record = next(r for r in manager().kernels() if r.distribution == "x-odd")
    assert record.state == "broken"
    assert reason in record.reason
    assert record.kernel is None


def test_class_whose_attributes_raise(package):
    package(
        "x-odd",
        "odd",
        source="from abc import ABCMeta\nfrom fuseplug import BaseKernel\n"
        "class Meta(ABCMeta):\n    def __getattribute__(cls, name): raise RuntimeError(name)\n"
        "class Kernel(BaseKernel, metaclass=Meta): ...\n",
    )
    package("x-good", "good")
    found = find()
    assert found["x-odd:odd"].state == "broken"
    assert "RuntimeError" in found["x-odd:odd"].reason
    assert found["x-good:good"].state == "ready"


@pytest.mark.parametrize("value", ["x_missing:Kernel", "x_there:Nothing", "not a reference!"])
def test_entry_point_to_nothing(distribution, value):
    distribution("x-odd", entry_points={"odd": value}, files={"x_there.py": ""})
    assert find()["x-odd:odd"].state == "broken"


class TestDamagedMetadata:
    """Discovery must not stop at the first distribution whose metadata is damaged."""

    @pytest.mark.parametrize(
        "damage",
        [
            lambda info: (info / "METADATA").unlink(),
            lambda info: (info / "METADATA").write_text("Metadata-Version: 2.1\n"),
            lambda info: (info / "entry_points.txt").write_text("[fuseplug.kernels]\nno equals sign\n"),
            lambda info: (info / "entry_points.txt").write_bytes(b"[fuseplug.kernels]\n\xff = a:b\n"),
        ],
        ids=["no metadata", "no name", "no value", "not text"],
    )
    def test_is_named_and_hides_nobody(self, package, site, damage):
        package("x-damaged", "damaged")
        package("x-good", "good")
        damage(site / "x_damaged-1.0.dist-info")
        found = find(prefix="x")
        assert found.pop("x-good:good").state == "ready"
        (record,) = found.values()
        assert record.state == "broken"
        assert record.distribution.replace("_", "-").startswith("x-damaged")
        assert "metadata cannot be read" in record.reason
        assert record.traceback


class TestConflict:
    def test_where_nobody_has_the_id_both_are_quarantined_and_named(self, package):
        for name in ("x-b", "x-a"):
            package(name, "same")
        package("x-c", "third")
        found = find()
        assert found["x-c:third"].state == "ready"
        for name, other in (("x-a:same", "x-b:same"), ("x-b:same", "x-a:same")):
            assert found[name].state == "conflict"
            assert found[name].kernel is None
            assert "claimed by x-a:same and x-b:same" in found[name].reason
            assert f"choose this one with FUSEPLUG_KERNELS=-{other}" in found[name].reason

    @pytest.mark.parametrize("number", [2, 3])
    def test_the_remedy_it_names_works(self, package, number):
        for i in range(number):
            package(f"x-{i}", "same")
        reason = find()["x-0:same"].reason
        chosen = find(kernels=re.search(r"FUSEPLUG_KERNELS=(\S+)", reason)[1])
        assert {name: r.state for name, r in chosen.items()} == {
            "x-0:same": "ready",
            **{f"x-{i}:same": "off" for i in range(1, number)},
        }

    @pytest.mark.parametrize(
        "environ", [{"allow": "x-b"}, {"kernels": "-x-a:same"}, {"kernels": "x-b:same"}], ids=["allow", "minus", "name"]
    )
    def test_resolved_by_the_environment(self, package, environ):
        for name in ("x-a", "x-b"):
            package(name, "same")
        found = find(**environ)
        assert found["x-b:same"].state == "ready"
        assert found["x-a:same"].state in ("off", "not allowed")

    def test_code_of_either_is_not_imported(self, package, tmp_path):
        for name in ("x-a", "x-b"):
            package(name, "same", source=f"open({str(tmp_path / name)!r}, 'w')")
        find()
        assert not (tmp_path / "x-a").exists()
        assert not (tmp_path / "x-b").exists()

    @pytest.mark.parametrize(
        ("first", "newcomer", "kernel_id"),
        [
            ("x-acme", "x-b", "x_acme_norm"),
            ("X_Acme", "x-b", "x_acme_norm"),
            ("x-acme", "x", "x_acme_norm"),
            ("x-acme", "x-acm", "x_acme_norm"),
            ("x-acme", "x-b", "x-acme"),
            ("fuseplug-x", "x-b", "fuseplug_x_norm"),
        ],
    )
    def test_whose_name_the_id_begins_with_stays_in_force(self, package, tmp_path, first, newcomer, kernel_id):
        package(newcomer, kernel_id, source=f"open({str(tmp_path / 'imported')!r}, 'w')")
        package(first, kernel_id)
        found = find(prefix="")
        assert found[f"{first}:{kernel_id}"].state == "ready"
        quarantined = found[f"{newcomer}:{kernel_id}"]
        assert (quarantined.state, quarantined.kernel) == ("conflict", None)
        assert f"the id is that of {first}, which stays in force; uninstall {newcomer}, or choose" in quarantined.reason
        assert not (tmp_path / "imported").exists()
        chosen = quarantined.reason.partition("FUSEPLUG_KERNELS=")[2].partition(",")[0]
        states = {name: r.state for name, r in find(prefix="", kernels=chosen).items() if r.kernel_id == kernel_id}
        assert states[f"{first}:{kernel_id}"] == "off"
        assert states[f"{newcomer}:{kernel_id}"] == "broken"  # it was imported, and contains no class

    def test_the_id_of_a_backend_belongs_to_no_distribution_named_after_it(self, package):
        package("fuseplug-x", "x_norm")
        package("x-b", "x_norm")
        found = find(prefix="")
        assert {found[f"{name}:x_norm"].state for name in ("fuseplug-x", "x-b")} == {"conflict"}

    def test_our_ids_have_no_privilege(self, package, tmp_path):
        package("x-a", "inductor_fused_rmsnorm", source=f"open({str(tmp_path / 'imported')!r}, 'w')")
        claimants = {name: r for name, r in find(prefix="").items() if r.kernel_id == "inductor_fused_rmsnorm"}
        assert claimants.keys() == {"fuseplug-rmsnorm:inductor_fused_rmsnorm", "x-a:inductor_fused_rmsnorm"}
        assert {record.state for record in claimants.values()} == {"conflict"}
        assert all("claimed by fuseplug-rmsnorm:" in record.reason for record in claimants.values())
        assert not (tmp_path / "imported").exists()

    def test_an_owner_that_claims_it_twice_owns_nothing(self, package, distribution):
        distribution("x-a", entry_points="x_a_norm = a:B\nx_a_norm = a:C\n")
        package("x-b", "x_a_norm")
        found = find()
        assert "declared 2 times by its own distribution" in found["x-a:x_a_norm"].reason
        assert found["x-b:x_a_norm"].state == "conflict"

    def test_asked_for_by_its_id_is_the_one_in_force(self, package):
        package("x-same", "x_same", source=source("x_same"))
        package("x-b", "x_same")
        ours = manager()
        assert not ours.plan(nn.Linear(1, 1), include="x_same").report.entries
        ours.plan(nn.Linear(1, 1), exclude=["x-same:x_same", "x-b:x_same"])


class TestRequirements:
    def installed(self, package, tmp_path, *requires, extras="[npu]"):
        self.imported = tmp_path / "imported"
        text = f"open({str(self.imported)!r}, 'w')\n" + source("needy")
        package("x-needy", "needy", source=text, extras=extras, requires=requires)
        return find()["x-needy:needy"]

    @pytest.mark.parametrize(
        ("requirement", "state", "named"),
        [
            ("no-such-thing>=2; extra == 'npu'", "not installed", "needs no-such-thing>=2 (not installed)"),
            ("no-such-thing", "missing", "needs no-such-thing (not installed)"),
            ("pluggy>=99", "missing", "needs pluggy>=99 (installed: "),
            ("pluggy ~ nonsense", "missing", "not a valid requirement"),
            ("fuseplug>=2", "missing", "needs fuseplug>=2 (installed: 0."),
            ("torch<2", "missing", "needs torch<2 (installed: 2."),
            ("torch<2; extra == 'npu'", "not installed", "needs torch<2 (installed: 2."),
            ("torch<2; python_version >= '3'", "missing", "needs torch<2 (installed: 2."),
            ("transformers>=99; extra == 'npu'", "not installed", "needs transformers>=99 ("),
            ("torch_npu<2; extra == 'npu'", "not installed", "needs torch_npu<2 ("),
        ],
    )
    def test_missing(self, package, tmp_path, requirement, state, named):
        record = self.installed(package, tmp_path, requirement)
        assert record.state == state
        assert named in record.reason
        assert record.reason.endswith('pip install "x-needy[npu]"')
        assert not self.imported.exists()

    @pytest.mark.parametrize(
        "requirement",
        ["pluggy>=1; extra == 'npu'", "no-such-thing; extra == 'cuda'", "no-such-thing; python_version < '3'"],
    )
    def test_met_or_not_asked_for(self, package, tmp_path, requirement):
        assert self.installed(package, tmp_path, requirement).state == "ready"
        assert self.imported.exists()

    @pytest.mark.parametrize(("version", "state"), [("3.7.1+rocm", "ready"), ("3.1", "not installed")])
    def test_triton_by_the_name_it_has_for_another_device(self, distribution, package, tmp_path, version, state):
        distribution("triton-rocm", version=version)
        assert self.installed(package, tmp_path, "triton>=3.6; extra == 'cuda'", extras="[cuda]").state == state

    def test_planned_for_another_machine(self, package, tmp_path):
        """The requirements of an extra depend on the machine; those of the distribution itself do not."""
        here = self.installed(package, tmp_path, "no-such-thing>=2; extra == 'npu'")
        there = elsewhere(here)
        assert (there.state, there.requires, there.kernel.kernel_id) == ("ready", "x-needy[npu]", "needy")
        assert (here.state, here.kernel) == ("not installed", None)

    @pytest.mark.parametrize(
        ("requirement", "extras"), [("no-such-thing", "[npu]"), ("no-such-thing", ""), ("pluggy", "[npu]")]
    )
    def test_another_machine_makes_no_difference(self, package, tmp_path, requirement, extras):
        record = self.installed(package, tmp_path, requirement, extras=extras)
        imported = self.imported.exists()
        assert elsewhere(record) is record
        assert self.imported.exists() == imported

    def test_a_kernel_that_cannot_be_imported_here_stays_missing(self, package, tmp_path):
        package("x-a", "a", source="import no_such_thing", extras="[npu]", requires=["no-such-thing; extra == 'npu'"])
        record = find()["x-a:a"]
        assert elsewhere(record) is record


class TestKernelsVariable:
    @pytest.fixture(autouse=True)
    def installed(self, package):
        for name in ("x-a", "x-b"):
            package(name, name[-1])

    @pytest.mark.parametrize(
        ("value", "ready"),
        [
            ("a", {"a"}),
            ("a,b", {"a", "b"}),
            (" a  b ", {"a", "b"}),
            ("x-a:a", {"a"}),
            ("-a", {"b"}),
            ("-x-a:a", {"b"}),
            ("none", set()),
            ("none,-a", set()),
            ("", set()),
            (" , ", set()),
        ],
    )
    def test_chooses(self, value, ready):
        found = find(kernels=value)
        assert {r.kernel_id for r in found.values() if r.state == "ready"} == ready
        for record in found.values():
            assert record.state in ("ready", "off")
            assert (record.kernel is None) == (record.state == "off")
            assert record.state == "ready" or "FUSEPLUG_KERNELS" in record.reason

    @pytest.mark.parametrize("word", ["nope", "-nope", "x-a:b"])
    def test_unknown_id_is_a_record(self, word):
        unknown = find(kernels=f"a,{word}")[f":{word.lstrip('-')}"]
        assert (unknown.state, unknown.distribution) == ("missing", "")
        assert "FUSEPLUG_KERNELS names it, but it is not installed" in unknown.reason

    def test_counts_for_registered_kernels(self):
        ours = manager(kernels="mine")
        ours.register(kernel_class("mine"))
        ours.register(kernel_class("other"))
        states = {r.kernel_id: r.state for r in ours.kernels() if r.distribution in ("(registered)", "")}
        assert states == {"mine": "ready", "other": "off"}


class TestAllowVariable:
    @pytest.mark.parametrize("value", ["x-some-thing", "X_Some.Thing", "other, x_some-thing"])
    def test_names_are_normalised(self, package, value):
        package("x-Some.thing", "a", source=source("a"))
        assert find(allow=value)["x-Some.thing:a"].state != "not allowed"

    @pytest.mark.parametrize("value", ["other", "", "x-a:a"])
    def test_code_of_others_is_never_imported(self, package, tmp_path, value):
        package("x-a", "a", source=f"open({str(tmp_path / 'imported')!r}, 'w')")
        record = find(allow=value)["x-a:a"]
        assert record.state == "not allowed"
        assert "FUSEPLUG_ALLOW does not name x-a" in record.reason
        assert not (tmp_path / "imported").exists()


def test_order_does_not_depend_on_the_path(tmp_path, monkeypatch, site):
    from importlib import invalidate_caches

    places = [tmp_path / "one", tmp_path / "two"]
    for place, names in zip(places, (("x-c", "x-a"), ("x-b",)), strict=True):
        for name in names:
            write_distribution(place, name, entry_points="z = nothing:A\na = nothing:B\n")
    orders = []
    rest = list(sys.path)
    for order in (places, places[::-1]):
        monkeypatch.setattr(sys, "path", [*map(str, order), *rest])
        invalidate_caches()
        orders.append(list(find()))
    assert orders[0] == orders[1] == [f"x-{d}:{k}" for d in "abc" for k in "az"]


def test_first_distribution_of_a_name_hides_later_ones(tmp_path, monkeypatch, package, distribution):
    package("x-a", "old")
    later = sys.path[0]
    newer = tmp_path / "newer"
    write_distribution(newer, "x-a", "2.0")
    assert list(find()) == ["x-a:old"]
    monkeypatch.syspath_prepend(str(newer))
    assert sys.path[1] == later
    assert find() == {}


def kernel_class(name: str, **attributes: object) -> type[BaseKernel]:
    body = {"kernel_id": name, "op": "o", "function": "a:b", "reference": "a:b", "match": lambda self, site: None}
    return type("Local", (BaseKernel,), {**body, **attributes})


class TestManager:
    def test_kernels_are_found_once_and_again_on_refresh(self, package):
        package("x-a", "a")
        ours = manager()
        first = ours.kernels()
        package("x-b", "b")
        assert ours.kernels() == first
        first.clear()
        assert ours.kernels() != []
        ours.refresh()
        assert [r.kernel_id for r in ours.kernels() if r.distribution.startswith("x-")] == ["a", "b"]

    def test_registered(self):
        ours = manager()
        kernel = kernel_class("mine")
        assert ours.register(kernel) is kernel
        (record,) = [r for r in ours.kernels() if r.distribution == "(registered)"]
        assert (record.state, type(record.kernel)) == ("ready", kernel)

    def test_second_of_an_id_replaces_the_first(self):
        ours = manager()
        ours.register(kernel_class("mine"))
        again = ours.register(kernel_class("mine", op="again"))
        (record,) = [r for r in ours.kernels() if r.distribution == "(registered)"]
        assert type(record.kernel) is again

    def test_clash_with_an_installed_one(self, package):
        package("x-a", "a")
        ours = manager()
        with pytest.raises(DiscoveryError, match="x-a already has a kernel 'a'; give yours another"):
            ours.register(kernel_class("a"))
        assert "(registered)" not in {r.distribution for r in ours.kernels()}

    def test_takes_the_place_of_one_that_is_off(self, package):
        package("x-a", "a")
        ours = manager(kernels="-x-a:a")
        ours.register(kernel_class("a"))
        states = {r.distribution: r.state for r in ours.kernels() if r.kernel_id == "a"}
        assert states == {"(registered)": "ready", "x-a": "off"}

    def test_what_is_installed_later_gives_way_to_what_is_registered(self, package):
        ours = manager()
        ours.register(kernel_class("a"))
        package("x-a", "a")
        ours.refresh()
        for _ in range(2):
            states = {r.distribution: r.state for r in ours.kernels() if r.kernel_id == "a"}
            assert states == {"(registered)": "ready", "x-a": "conflict"}
            ours.register(kernel_class("a"))  # registers again, as a notebook does

    def test_register_kernel_is_that_of_the_manager(self):
        import fuseplug

        assert fuseplug.register_kernel == fuseplug.manager.register

    @pytest.mark.parametrize(
        ("source_text", "state"), [("1 / 0", "broken: ZeroDivisionError"), (source("a"), "in conflict: claimed by")]
    )
    def test_asked_for_by_name(self, package, source_text, state):
        package("x-a", "a", source=source_text)
        if state.startswith("in conflict"):
            package("x-b", "a")
        with pytest.raises(DiscoveryError, match=f"x-a:a was asked for by name, but is {state}"):
            self.plan(manager(), "a")

    @staticmethod
    def plan(ours: KernelManager, include: str) -> object:
        return ours.plan(nn.Linear(1, 1), include=include)

    def test_what_pluggy_refuses_is_a_record(self, package):
        package("x-odd", "odd", source=source("odd", "def __dir__(self): raise OSError('no chip')"))
        package("x-good", "good")
        states = {r.kernel_id: r for r in manager().kernels() if r.distribution.startswith("x-")}
        assert states["good"].state == "ready"
        assert states["odd"].state == "broken"
        assert "while registering it with pluggy: no chip" in states["odd"].reason
        assert "no chip" in states["odd"].traceback


def test_a_manager_may_be_told_where_kernels_are_found():
    class Own(BaseKernel):
        kernel_id = "own"
        op = function = reference = "a:b"

        def match(self, site):
            return None

    record = KernelRecord("own", "(here)", kernel=Own())
    seen = []

    def find(environ, registered):
        seen.append((environ, list(registered)))
        return [record]

    assert KernelManager({"A": "1"}, find).kernels() == [record]
    assert seen == [({"A": "1"}, [])]
