"""Passed checks are kept for other processes, until anything changes that they depend on."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.managers import manager_of
from support.models import Norm
from support.thorough import thorough

from fuseplug import disk_cache
from fuseplug.cli import main
from fuseplug.disk_cache import DiskCache, folder
from fuseplug_backends.inductor import rehearsal
from fuseplug_backends.inductor.kernel import cpp_compiler
from fuseplug_rmsnorm.recognise.adapters import NormAdapter
from fuseplug_tools.measuring import timing
from fuseplug_verify.verification import evidence
from fuseplug_verify.verification.evidence import UnstableError, stable

PACKAGE = """
from support.kernels import NormKernel, variant_of

Counting = variant_of(NormKernel, "counting_norm", function="kept_kernel.numbers:norm", check_sizes=(64,))
"""
NUMBERS = """
from support.kernels import norm_reference as reference

calls = 0

def norm(*args, **kwargs):
    global calls
    calls += 1
    return reference(*args, **kwargs)
"""
BEFORE = time.time() - 3600

pytestmark = pytest.mark.usefixtures("examined_once")


def install(folder, name, version, when=BEFORE):
    """Write a distribution's metadata in place of any other version's."""
    for other in folder.glob(f"{name}-*.dist-info"):
        other.rmdir()
    path = folder / f"{name}-{version}.dist-info"
    path.mkdir()
    os.utime(path, (when, when))


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Install a distribution with a kernel; return a function that writes one of its files."""
    root = tmp_path / "kept_kernel"
    root.mkdir()
    install(tmp_path, "kept_kernel", "1.0")

    def write(name, text):
        (root / name).write_text(text)
        importlib.invalidate_caches()

    write("__init__.py", PACKAGE)
    write("numbers.py", NUMBERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in [name for name in sys.modules if name.startswith("kept_kernel")]:
        del sys.modules[name]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    where = tmp_path / "cache"
    monkeypatch.setenv(disk_cache.VARIABLE, str(where))
    installed = evidence._must_be_installed
    # This checkout is installed as editable, and the kernel's reference belongs to the tests.
    here = ("fuseplug", "support")
    monkeypatch.setattr(evidence, "_must_be_installed", lambda name: name.startswith(here) or installed(name))
    monkeypatch.setattr(evidence, "_installed", evidence._installed.__wrapped__)
    return where


@pytest.fixture
def checked(written, cache):
    """Plan a norm; return what the report says of the check, and how often the kernel was called."""

    def run(module=None, **options):
        numbers = importlib.import_module("kept_kernel.numbers")
        kernel = importlib.import_module("kept_kernel").Counting
        before = numbers.calls
        (entry,) = manager_of(kernel).plan(module or Norm(), **options).report.entries
        return entry.check or entry.why_not, numbers.calls - before

    return run


class TestWhatIsKept:
    def test_a_kernel_that_passed_is_not_run_again(self, checked, cache):
        said, calls = checked()
        assert said == "passed"
        assert calls > 5
        assert checked() == ("passed before", 0)
        assert len(DiskCache("checks", cache)) == 1

    def test_unless_the_user_insists(self, checked):
        _, calls = checked()
        assert checked(verify="always") == ("passed", calls)

    @pytest.mark.skipif(cpp_compiler(os.environ) is None, reason="Inductor needs a C++ compiler")
    def test_where_compilers_run_side_by_side_it_is_not_run_for_them_either(self, checked, written, monkeypatch):
        monkeypatch.setattr(rehearsal, "inductor_threads", lambda: 2)
        compiling = "\nclass Counting(InductorKernel, Counting):\n    pass\n"
        written("__init__.py", "from fuseplug_backends.inductor import InductorKernel\n" + PACKAGE + compiling)
        said, calls = checked()
        assert said == "passed"
        assert calls > 5
        assert checked() == ("passed before", 0)

    def test_what_was_found_is_what_guards_the_calls(self, written, cache):
        kernel = importlib.import_module("kept_kernel").Counting
        numbers = importlib.import_module("kept_kernel.numbers")
        inputs = [torch.ones(2, 16, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        counted = []
        for _ in range(2):
            model = Norm()
            with manager_of(kernel).apply_all(model):
                before = numbers.calls
                for x in inputs:
                    model(x)
                counted.append(numbers.calls - before)
        assert counted[0] == counted[1] < len(inputs)

    def test_the_weights_make_no_difference(self, checked):
        checked()
        other = Norm()
        torch.nn.init.normal_(other.weight)
        assert checked(other) == ("passed before", 0)


class Another(Norm):
    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(dtype)


class TestWhatMakesItRunAgain:
    def again(self, checked, *args, **options):
        said, calls = checked(*args, **options)
        assert said == "passed"
        assert calls > 5

    @pytest.mark.parametrize(
        "make",
        [lambda: Norm(eps=1e-3), lambda: Another(), lambda: Norm(size=48)],
        ids=["another number", "other code with the same results", "another width"],
    )
    def test_another_module(self, checked, make):
        checked()
        self.again(checked, make())

    def test_that_its_bits_must_be_the_originals(self, checked):
        checked()
        self.again(checked, rounding="exact")
        assert checked() == checked(rounding="exact") == ("passed before", 0)
        self.again(checked, rounding="exact", mode="inference")

    def test_that_it_had_no_gradients(self, checked):
        checked(mode="inference")
        self.again(checked)
        assert checked() == checked(mode="inference") == ("passed before", 0)

    @pytest.mark.parametrize("name", ["kept_kernel", "something"])
    def test_another_version_of_the_kernel_or_another_distribution(self, checked, tmp_path, name):
        checked()
        install(tmp_path, name, "1.1")
        self.again(checked)

    @pytest.mark.parametrize("name", ["TORCHINDUCTOR_CPP_ENABLE_FAST_MATH", "CXX", "TRITON_INTERPRET"])
    def test_the_environment(self, checked, monkeypatch, name):
        checked()
        monkeypatch.setenv(name, "1")
        self.again(checked)

    def test_the_number_of_threads(self, checked):
        checked()
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(threads + 1)
            self.again(checked)
        finally:
            torch.set_num_threads(threads)

    def test_another_version_of_the_driver(self, checked, tmp_path, monkeypatch):
        """Or of anything else below torch. An absent file counts as one more version."""
        version = tmp_path / "version.info"
        monkeypatch.setitem(evidence._VERSION_FILES, "cpu", (str(version),))
        checked()
        assert checked() == ("passed before", 0)
        for said in ("Version=25.2.0\n", "Version=25.3.1\n"):
            version.write_text(said)
            self.again(checked)
        assert checked() == ("passed before", 0)
        version.unlink()
        assert checked() == ("passed before", 0)

    def test_an_answer_that_cannot_be_read(self, checked, cache):
        checked()
        for text in ("", "{", "[]", '{"dtypes": 1}', '{"dtypes": [["nothing"]]}'):
            for path in (cache / "checks").glob("*.json"):
                path.write_text(text)
            self.again(checked)


@pytest.mark.parametrize("text", ["[" * 200_000, "", "nothing", "{", "\x00", "[" * 200_000 + "]" * 200_000])
def test_what_cannot_be_read_is_not_there(cache, text):
    kept = DiskCache("checks", cache)
    kept.put("key", {"ran": 1})
    (path,) = (cache / "checks").glob("*.json")
    path.write_text(text)
    assert kept.get("key") is None


class TestWhatIsNotKept:
    def test_that_a_kernel_is_wrong(self, checked, written, cache):
        written("numbers.py", NUMBERS.replace("return reference", "return 2 * reference"))
        for _ in range(2):
            said, calls = checked()
            assert "its numbers are wrong" in said
            assert calls
        assert not len(DiskCache("checks", cache))

    @pytest.mark.parametrize("when", ["not installed", "installed since"])
    def test_anything_of_a_kernel_whose_version_is_not_known(self, checked, tmp_path, cache, when):
        """The kernel may be editable, or installed so late that the process may have imported older files."""
        (tmp_path / "kept_kernel-1.0.dist-info").rmdir()
        if when == "installed since":
            install(tmp_path, "kept_kernel", "1.1", when=time.time() + 1)
        for _ in range(2):
            assert checked()[0] == "passed"
        assert not len(DiskCache("checks", cache))

    def test_anything_of_a_kernel_that_is_in_no_package(self, written, cache):
        class Here(importlib.import_module("kept_kernel").Counting):
            kernel_id = "here_norm"

        for _ in range(2):
            (entry,) = manager_of(Here).plan(Norm()).report.entries
            assert entry.check == "passed"
        assert not len(DiskCache("checks", cache))

    def test_anything_where_nothing_can_be_written(self, checked, cache):
        cache.write_text("a file in the place of the directory")
        for _ in range(2):
            assert checked()[0] == "passed"

    def test_anything_that_cannot_be_described(self, checked, cache, monkeypatch):
        def raises(value):
            raise ValueError(value)

        monkeypatch.setattr(evidence, "stable", raises)
        for _ in range(2):
            assert checked()[0] == "passed"
        assert not len(DiskCache("checks", cache))

    def test_anything_without_a_home(self, checked, monkeypatch):
        monkeypatch.delenv(disk_cache.VARIABLE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
        assert folder() is None
        for _ in range(2):
            assert checked()[0] == "passed"

    def test_anything_if_it_is_off(self, checked, monkeypatch, tmp_path):
        monkeypatch.setenv(disk_cache.VARIABLE, "off")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        for _ in range(2):
            assert checked()[0] == "passed"
        assert not (tmp_path / "home").exists()


class TestTimes:
    @pytest.fixture
    def timed(self, written, cache, monkeypatch):
        """Measure a norm; return the number of timings, and what the report says of them."""
        monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
        monkeypatch.setattr(timing, "SECONDS", 0.01)
        count, by_turns = [0], timing.by_turns

        def counted(*args, **kwargs):
            count[0] += 1
            return by_turns(*args, **kwargs)

        monkeypatch.setattr(timing, "by_turns", counted)

        def run(*shape, module=None, **options):
            kernel = importlib.import_module("kept_kernel").Counting
            before, module = count[0], module or Norm()
            batch = {"hidden_states": torch.ones(shape or (4, 16), dtype=module.weight.dtype)}
            (entry,) = manager_of(kernel).plan(module, measure=batch, **options).report.entries
            return count[0] - before, entry.figures or entry.why_not

        return run

    def test_what_was_measured_is_not_measured_again(self, timed, cache):
        times, said = timed()
        assert times == 2
        assert timed() == (0, said)
        assert len(DiskCache("timings", cache)) == 2

    def test_unless_the_user_insists(self, timed):
        timed()
        assert timed(verify="always")[0] == 2

    def test_for_inference_it_is_the_forward_alone(self, timed):
        assert timed(mode="inference")[0] == 1
        assert timed(mode="inference")[0] == 0
        assert timed()[0] == 1

    @pytest.mark.parametrize("change", ["shape", "dtype", "module", "kernel", "threads", "processor"])
    def test_other_questions_have_other_answers(self, timed, tmp_path, monkeypatch, change):
        timed()
        if change == "kernel":
            install(tmp_path, "kept_kernel", "1.1")
        if change == "processor":
            monkeypatch.setattr(timing, "processor", lambda: "another")
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(threads + (change == "threads"))
            shape = (5, 16) if change == "shape" else (4, 16)
            module = {"dtype": Norm().bfloat16(), "module": Norm(eps=1e-3)}.get(change)
            assert timed(*shape, module=module)[0] == 2
        finally:
            torch.set_num_threads(threads)

    @pytest.mark.parametrize("text", ["", "[]", '{"gain": 2}', '{"original": 1, "kernel": 1, "gain": NaN}'])
    def test_an_answer_that_cannot_be_read_is_none(self, timed, cache, text):
        timed()
        for path in (cache / "timings").glob("*.json"):
            path.write_text(text)
        assert timed()[0] == 2


class TestDescriptions:
    @thorough
    def test_they_are_the_same_in_every_process(self):
        script = (
            "from fuseplug_verify.verification.evidence import Evidence, stable\n"
            "from fuseplug_linear_cross_entropy.recognise.structure import HeadAdapter, Mix\n"
            "import torch\n"
            "def f(x):\n    return {'a', 'b'} if x in {'c', 'd', 'e'} else [y for y in x]\n"
            "evidence = Evidence()\nevidence.code([f.__code__])\n"
            "print(stable((HeadAdapter('linear', frozenset({'added', 'capped'})), Mix(torch.float32, 'summed'))))\n"
            "print(evidence.digest())\n"
        )
        said = [
            subprocess.run(
                [sys.executable, "-c", "\n" * lines + script],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed, lines in (("1", 0), ("2", 5))
        ]
        assert said[0] == said[1]
        assert "HeadAdapter(variant=str 'linear'" in said[0]

    def test_they_differ_where_values_do(self):
        adapters = [NormAdapter("llama", "weight", eps, None, None, False, False) for eps in ("eps", "epsilon")]
        values = [1, 1.0, True, "1", None, (1,), [1], (1, 2), torch.float16, torch.Size((1,)), *adapters]
        assert len({stable(value) for value in values}) == len(values)

    @pytest.mark.parametrize(
        "value",
        [object(), lambda: 0, (1, object()), {"a": torch.ones(1)}],
        ids=["an object", "a lambda", "an object within", "a tensor"],
    )
    def test_what_has_none_is_said_to(self, value):
        with pytest.raises(UnstableError):
            stable(value)


class TestWhere:
    @pytest.mark.parametrize(
        ("environ", "found"),
        [
            ({"FUSEPLUG_CACHE": "off"}, None),
            ({"FUSEPLUG_CACHE": " OFF "}, None),
            ({"FUSEPLUG_CACHE": "/somewhere"}, Path("/somewhere")),
            ({"FUSEPLUG_CACHE": "", "XDG_CACHE_HOME": "/kept"}, Path("/kept/fuseplug")),
            ({}, Path.home() / ".cache" / "fuseplug"),
        ],
        ids=str,
    )
    @pytest.mark.skipif(sys.platform == "win32", reason="another directory there")
    def test_the_directory(self, environ, found):
        assert folder(environ) == found

    def test_the_command_counts_and_forgets(self, checked, cache, capsys):
        checked()
        _run("cache")
        assert capsys.readouterr().out == f"{cache}: 1 checks, 0 timings\n"
        _run("cache", "--clear")
        assert capsys.readouterr().out == f"{cache}: 1 checks, 0 timings forgotten\n"
        assert not len(DiskCache("checks", cache))

    def test_the_command_says_if_nothing_is_kept(self, monkeypatch, capsys):
        monkeypatch.setenv(disk_cache.VARIABLE, "off")
        _run("cache")
        assert "nothing is kept: FUSEPLUG_CACHE=off" in capsys.readouterr().out


def _run(*args):
    with pytest.raises(SystemExit) as leave:
        main(args)
    assert not leave.value.code
