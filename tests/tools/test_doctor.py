"""What doctor reports on machines that lack something."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from support.thorough import thorough

from fuseplug import BaseKernel
from fuseplug.discovery.records import KernelRecord
from fuseplug_backends.npu import NpuKernel
from fuseplug_tools import ascend, doctor
from fuseplug_tools.doctor import MachineState, examine


def npus_of(chip):
    return types.SimpleNamespace(device_count=lambda: 2, get_device_name=lambda index: chip)


def machine(devices=("cpu",), error=None, version="2.13.0", npus=0, chip="", **environ):
    torch = None if error else types.SimpleNamespace(__version__=version, npu=npus_of(chip))
    return MachineState(environ, torch=torch, torch_error=error, devices=devices, npus=npus)


def kernel(unavailable=lambda self, kind: None, devices=()):
    answers = {"device_types": devices, "unavailable": unavailable, "match": lambda self, site: None}
    made = type("Kernel", (BaseKernel,), answers)()
    return KernelRecord("k", "x-dist", "1.0", kernel=made)


def row(rows, name):
    (found,) = [row for row in rows if row.name == name]
    return found


@pytest.fixture
def versions(monkeypatch):
    installed = {"torch": "2.13.0"}
    for module in (doctor, ascend):
        monkeypatch.setattr(module, "version_of", installed.get)
    return installed


@pytest.fixture
def root(monkeypatch, tmp_path):
    """An empty folder in place of ``/usr/local/Ascend``."""
    monkeypatch.setattr(ascend, "ASCEND", tmp_path)
    return tmp_path


def raises(self, kind):
    raise OSError("no driver")


@pytest.mark.parametrize(
    ("record", "state", "found"),
    [
        (kernel(), "ok", "ready on cpu, cuda"),
        (kernel(devices=("cuda",)), "ok", "ready on cuda"),
        (kernel(devices=("npu",)), "ok", "ready, but this machine has no npu"),
        (kernel(raises, devices=("npu",)), "ok", "ready, but this machine has no npu"),
        (kernel(lambda self, kind: f"install {kind}-tools"), "fail", "unavailable on cuda: install cuda-tools"),
        (
            kernel(lambda self, kind: "it" if kind == "cuda" else None),
            "warn",
            "ready on cpu; unavailable on cuda: it",
        ),
        (kernel(raises), "fail", "unavailable on cpu: OSError: no driver"),
        (KernelRecord("k", "d", state="broken", reason="bad", traceback="…"), "fail", "broken: bad"),
        (KernelRecord("k", "d", state="conflict", reason="both"), "fail", "conflict: both"),
        (KernelRecord("k", "d", state="missing", reason="needs x"), "fail", "missing: needs x"),
        (KernelRecord("k", "d", state="not installed", reason="needs x"), "ok", "not installed: needs x"),
        (KernelRecord("k", "", state="missing", reason="asked for"), "warn", "missing: asked for"),
        (KernelRecord("k", "d", state="off", reason="chosen"), "ok", "off: chosen"),
        (KernelRecord("k", "d", state="not allowed", reason="chosen"), "ok", "not allowed: chosen"),
    ],
)
def test_kernel(record, state, found):
    said = row(examine(machine(("cpu", "cuda")), [record]), "k")
    assert said.state == state
    assert found in said.found
    assert ("list -v" in said.remedy) == bool(record.traceback)


def test_a_kernel_that_is_slow_to_import_is_not_ok():
    cost = "importing mine imports torch: import it in match() or later"
    found = row(examine(machine(), [replace(kernel(), import_costs=(cost,))]), "k")
    assert (found.state, found.remedy) == ("warn", "tell whoever wrote it")
    assert found.found == f"ready on cpu, but {cost} (x-dist 1.0)"


def test_no_kernels():
    said = row(examine(machine(), []), "kernels")
    assert (said.state, said.remedy) == ("warn", "pip install fuseplug-rmsnorm, for one")


def test_torch_that_is_not_installed():
    rows = examine(machine((), ModuleNotFoundError("No module named 'torch'", name="torch")), [kernel()])
    assert row(rows, "torch")[1:] == ("fail", "not installed", "pip install torch")
    assert "not asked" in row(rows, "k").found


def test_torch_that_does_not_load():
    said = row(examine(machine((), OSError("libc10.so")), []), "torch")
    assert said.state == "fail"
    assert "OSError: libc10.so" in said.found
    assert "reinstall torch" in said.remedy


SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
INSTALL = 'pip install --upgrade "torch_npu==2.13.*"'


class TestTorchNpu:
    @pytest.mark.parametrize(
        ("version", "here", "environ", "state", "remedy"),
        [
            (None, (), {}, "ok", ""),
            ("2.13.0", (("cpu", "npu"),), {}, "ok", ""),
            ("2.13.0", (), {}, "fail", SET_ENV),
            ("2.13.0.post1", (), {"ASCEND_HOME_PATH": "/usr/local/Ascend"}, "warn", "npu-smi info"),
            ("2.7.1", (), {}, "fail", INSTALL),
            ("2.7.1", ((), ImportError("undefined symbol")), {}, "fail", INSTALL),
            ("2.13.0", (), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "warn", ""),
        ],
        ids=["absent", "working", "no CANN", "no chip", "of another torch", "and torch fails", "turned off"],
    )
    def test_as_it_is_here(self, versions, version, here, environ, state, remedy):
        if version:
            versions["torch_npu"] = version
        said = row(examine(machine(*here, **environ), []), "torch_npu")
        assert said.state == state
        assert said.remedy.startswith(remedy)

    @pytest.mark.parametrize(
        ("npus", "environ", "seen"),
        [(8, {}, "8 Ascend NPUs"), (0, {"ASCEND_HOME_PATH": "/usr/local/Ascend"}, "CANN (ASCEND_HOME_PATH)")],
    )
    def test_absent_where_it_is_wanted(self, versions, npus, environ, seen):
        said = row(examine(machine(npus=npus, **environ), []), "torch_npu")
        assert (said.state, seen in said.found) == ("warn", True)
        assert said.remedy == INSTALL


def install_cann(root, toolkit, ops=None):
    """Write the files that CANN's installers write, with fewer lines; return the environment that they set."""
    folder = root / "cann" / "aarch64-linux"
    folder.mkdir(parents=True)
    for part, name, version in (("toolkit", "toolkit", toolkit), ("ops", "910b-ops", ops)):
        if version:
            text = f"package_name=Ascend-cann-{name}\nversion={version}\ninnerversion=V100R001\narch=aarch64\npath=/\n"
            (folder / f"ascend_{part}_install.info").write_text(text)
    return {"ASCEND_HOME_PATH": str(root / "cann")}


class TestCann:
    @pytest.mark.parametrize(
        ("torch_npu", "toolkit", "ops", "state", "told"),
        [
            ("2.9.0", "8.5.0", None, "ok", "toolkit 8.5.0"),
            ("2.9.0.post2", "9.0.0", "9.0.0", "ok", "910b-ops 9.0.0, toolkit 9.0.0"),
            ("2.9.0.post2", "9.1.0", "9.1.0", "ok", "910b-ops 9.1.0, toolkit 9.1.0"),
            ("2.9.0.post2", "8.5.0", "8.5.0", "warn", "; torch_npu 2.9.0.post2 is made for CANN 9.0.0"),
            ("2.7.1.post8", "8.3.RC2", None, "warn", "toolkit 8.3.RC2; torch_npu 2.7.1.post8 is made for CANN 9.1.0"),
            ("2.8.0", "8.2.RC1", None, "warn", "; torch_npu 2.8.0 is made for CANN 8.3.RC1"),
            ("2.10.0.post4", "9.2.0-beta.2", None, "ok", "toolkit 9.2.0-beta.2"),
            ("2.9.0", "8.0.RC2.alpha002", None, "ok", "toolkit 8.0.RC2.alpha002"),
            ("2.13.0", "8.3.RC1", None, "ok", "toolkit 8.3.RC1"),
            ("2.13.0", "9.1.0", "9.0.0", "warn", "910b-ops 9.0.0, toolkit 9.1.0"),
            (None, "9.1.0", None, "ok", "toolkit 9.1.0"),
        ],
    )
    def test_is_compared_with_what_torch_npu_is_made_for(self, versions, root, torch_npu, toolkit, ops, state, told):
        versions["torch_npu"] = torch_npu
        said = row(examine(machine(**install_cann(root, toolkit, ops)), []), "CANN")
        assert (said.state, bool(said.remedy)) == (state, state == "warn")
        assert said.found.endswith(told)

    @pytest.mark.parametrize("environ", [{}, {"ASCEND_HOME_PATH": "/nowhere"}])
    @pytest.mark.parametrize(
        ("folders", "script"), [(["ascend-toolkit"], 0), (["ascend-toolkit", "cann"], 1), ([], None)]
    )
    def test_where_nothing_says_its_version(self, versions, root, environ, folders, script):
        for folder in folders:
            (root / folder).mkdir()
            (root / folder / "set_env.sh").touch()
        said = row(examine(machine(npus=1, **environ), []), "CANN")
        assert said.state == "warn"
        assert said.found.startswith(f"unknown: ASCEND_HOME_PATH is {environ.get('ASCEND_HOME_PATH', 'not set')}")
        assert said.remedy == f"source {root}/{folders[script] if folders else 'ascend-toolkit'}/set_env.sh"

    def test_the_page_has_each_release_that_the_table_has(self):
        page = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text()
        assert all(f"{release};" in page or f"{release} |" in page for release in ascend.MADE_FOR)
        assert [*ascend.MADE_FOR] == sorted(ascend.MADE_FOR, key=Version)


class TestDriver:
    def said(self, root, npus=8, **files):
        for part, text in files.items():
            (root / part).mkdir()
            (root / part / "version.info").write_bytes(text)
        return row(examine(machine(npus=npus, ASCEND_HOME_PATH="/nowhere"), []), "NPU driver")

    def test_of_it_and_of_the_firmware(self, root):
        said = self.said(root, driver=b"Version=25.2.0\nascendhal_version=7.35\n", firmware=b"Version=7.7.0.6.236\n")
        assert (said.state, said.found, said.remedy) == ("ok", "driver 25.2.0, firmware 7.7.0.6.236", "")

    @pytest.mark.parametrize("files", [{}, {"driver": b"\xff\xfe?"}, {"driver": b""}])
    def test_unknown(self, root, files):
        said = self.said(root, **files)
        assert said.found == f"unknown, without {root}/driver/version.info"
        assert said.remedy.startswith("npu-smi info")

    def test_not_here(self, root):
        assert self.said(root, npus=0).found == "not here"


def test_without_anything_of_ascend_there_is_no_row_of_it(versions):
    assert not {"CANN", "NPU driver", "attention"} & {row.name for row in examine(machine(), [])}


class TestChips:
    @pytest.fixture(autouse=True)
    def patching(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def said(self, chip, *ops):
        class Kernel(NpuKernel):
            kernel_id = "k"

            def match(self, site): ...

            def unavailable(self, kind):
                return None

        Kernel.ops = ops
        self.monkeypatch.setattr(torch, "npu", npus_of(chip), raising=False)
        return row(examine(machine(("cpu", "npu"), chip=chip), [KernelRecord("k", "x", "1", kernel=Kernel())]), "k")

    @pytest.mark.parametrize("chip", ["Ascend910B3", "Ascend910_9382"])
    def test_documented(self, chip):
        assert self.said(chip, "npu_rms_norm", "npu_grouped_matmul").state == "ok"

    @pytest.mark.parametrize(
        ("chip", "op"),
        [
            ("Ascend310P3", "npu_moe_token_permute"),
            ("Ascend910B", "npu_grouped_matmul"),
            ("Ascend910A", "npu_gemma_rms_norm"),
            ("Ascend950PR_9599", "npu_rotary_mul"),
        ],
    )
    def test_undocumented(self, chip, op):
        said = self.said(chip, op, "npu_something_else")
        assert said.state == "warn"
        assert f"{op} is documented for Atlas A2" in said.found
        assert f"not for {chip}" in said.found
        assert said.found.count(chip) == 1

    def test_where_it_runs_on_another_device_its_chips_are_not_asked_for(self):
        class Kernel(NpuKernel):
            device_types = ("npu", "cpu")

            def match(self, site): ...

        said = row(examine(machine(), [KernelRecord("k", "x", "1", kernel=Kernel())]), "k")
        assert (said.state, said.found) == ("ok", "ready on cpu (x 1)")

    def test_of_a_new_chip_nothing_is_said(self):
        assert self.said("Ascend1000X", "npu_rms_norm").state == "ok"


@pytest.mark.parametrize(
    ("caveat", "found"),
    [
        (lambda self, kind: f"{kind} is new to it" if kind == "xpu" else None, "though xpu is new to it"),
        (raises, "though OSError: no driver (raised by its caveat())"),
    ],
)
def test_a_kernels_own_caveat(caveat, found):
    record = kernel()
    type(record.kernel).caveat = caveat
    said = row(examine(machine(("cpu", "xpu")), [record]), "k")
    assert (said.state, found in said.found) == ("warn", True)
    type(record.kernel).caveat = BaseKernel.caveat
    assert row(examine(machine(("cpu", "xpu")), [record]), "k").state == "ok"


@pytest.mark.parametrize(("version", "state"), [(None, "ok"), ("4.40.1", "warn"), ("4.57.6", "ok"), ("5.24.0", "ok")])
def test_transformers(versions, version, state):
    versions["transformers"] = version
    assert row(examine(machine(), []), "transformers").state == state


@pytest.mark.parametrize(
    ("installed", "devices", "state", "named"),
    [
        ((), ("cpu",), "ok", "no package"),
        (("causal-conv1d", "mamba-ssm"), ("cpu", "cuda"), "ok", "causal-conv1d 1, mamba-ssm 1"),
        (
            ("causal-conv1d",),
            ("cpu",),
            "warn",
            "has no cuda; transformers calls causal-conv1d on any device",
        ),
        (("flash-linear-attention", "causal-conv1d"), ("cpu", "npu"), "warn", "calls causal-conv1d on"),
    ],
)
def test_packages_for_linear_attention_that_have_no_device(versions, installed, devices, state, named):
    versions.update(dict.fromkeys(installed, "1"))
    said = row(examine(machine(devices), []), "linear attention")
    assert said.state == state
    assert named in said.found
    assert said.remedy.startswith("pip uninstall causal-conv1d,") == (state == "warn")


def test_variables():
    rows = examine(machine(FUSEPLUG_KERNELS="-a"), [])
    assert row(rows, "FUSEPLUG_KERNELS").found == "'-a'"
    assert row(rows, "FUSEPLUG_ALLOW").found.startswith("not set")
    assert row(rows, "FUSEPLUG_EVERY_SIZE").found.startswith("not set")


class TestCommand:
    @pytest.fixture(autouse=True)
    def allowed(self, monkeypatch):
        monkeypatch.setenv("FUSEPLUG_ALLOW", "x-a,x-b")

    def test_all_is_well(self, package, run):
        package("x-a", "a")
        code, out, err = run("doctor")
        assert (code, err) == (0, "")
        assert "ready on cpu" in out
        assert ", 0 fail" in out

    @pytest.mark.parametrize(("home", "shown"), [(sys.prefix, "(~/bin/"), ("/", f"({sys.prefix}/bin/")])
    def test_the_table_names_no_home(self, package, run, monkeypatch, home, shown):
        package("x-a", "a")
        monkeypatch.setenv("HOME", home)
        assert shown in run("doctor")[1]

    def test_something_cannot_work(self, package, run):
        package("x-a", "a", source="1 / 0")
        package("x-b", "b")
        code, out, _ = run("doctor", "--json")
        assert code == 1
        rows = {row["name"]: row for row in json.loads(out)}
        assert rows["a"]["state"] == "fail"
        assert rows["b"]["state"] == "ok"
        assert rows["Python"]["found"].startswith(".".join(map(str, sys.version_info[:3])))

    @thorough
    def test_torch_npu_without_cann(self, package, site, fresh_python):
        package("x-a", "a")
        release = torch.__version__.partition("+")[0]
        info = site / f"torch_npu-{release}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {release}\n")
        (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
        (site / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
        done = fresh_python("-m", "fuseplug", "doctor", COLUMNS="200")
        assert (done.returncode, done.stderr) == (1, "")
        assert "cannot be imported: ImportError: libhccl.so" in done.stdout
        assert (
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout
        )
        done = fresh_python("-m", "fuseplug", "doctor", COLUMNS="200", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert "not loaded: TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout
        assert done.returncode == 0
