"""What ``pytest --fuseplug-kernel`` shows."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.thorough import thorough

from fuseplug_testing.checks import CHECKS

TESTS = str(Path(__file__).parents[1])
ENTRY_POINTS = [entry.value for entry in importlib.metadata.entry_points(group="pytest11")]


@pytest.fixture
def run_pytest(tmp_path):
    """Run pytest in an empty directory, with the plugin once."""

    def run(*args):
        loaded = () if "fuseplug_testing.plugin" in ENTRY_POINTS else ("-p", "fuseplug_testing.plugin")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *loaded, *args]
        path = os.pathsep.join([TESTS, *filter(None, sys.path)])
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=300)

    return run


ZOO = "conformance.zoo"
THREE = [f"--fuseplug-kernel={ZOO}.{name}" for name in ("kernels:Gated", "adapters:NoSizes", "kernels:OnAnotherChip")]


def test_kernels_pass_fail_and_are_skipped_and_nothing_else_is_run(run_pytest, tmp_path):
    (tmp_path / "test_unrelated.py").write_text("def test_unrelated(): raise AssertionError")
    done = run_pytest(
        *THREE, "-v", "-rs", "-k", "Gated and (numbers or lazy) or declaration or Chip and numbers or unrelated"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_unrelated" not in done.stdout
    assert "fuseplug:conformance.zoo.kernels:Gated::numbers[0 SiluAndMul] PASSED" in done.stdout
    assert "it runs on npu, and none is here" in done.stdout
    assert "check_sizes must be positive numbers, at least one, not ()" in done.stdout
    assert "Traceback" not in done.stdout  # a fault is one line
    assert ".py:" not in done.stdout.partition("FAILURES")[2].partition("short test summary")[0]
    assert "1 failed, 3 passed, 3 skipped" in done.stdout  # Gated has no lazy result


@thorough
def test_a_path_on_the_command_line_is_run_too(run_pytest, tmp_path):
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    done = run_pytest(
        "test_other.py", "--fuseplug-kernel", "conformance.zoo.kernels:Gated", "-k", "other or declaration"
    )
    assert f"2 passed, {len(CHECKS) - 1} deselected" in done.stdout


@thorough
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_kernel", "--fuseplug-kernel no_such_kernel: no_such_kernel is not installed; these are: "),
        ("conformance.zoo.kernels:Nobody", "and cannot be imported: module 'conformance.zoo.kernels' has no attribute"),
    ],
)
def test_an_unknown_kernel_is_an_error_of_usage(run_pytest, name, message):
    done = run_pytest("--fuseplug-kernel", name)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr + done.stdout


def test_without_the_option_it_imports_no_torch_and_changes_nothing(run_pytest, tmp_path):
    (tmp_path / "test_other.py").write_text("import sys\ndef test_other(): assert 'torch' not in sys.modules")
    done = run_pytest()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
