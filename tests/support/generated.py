"""Distributions that ``fuseplug new`` has written: used as if they were installed, and broken on purpose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from fuseplug_tools.new.known_ops import KNOWN_OPS
from fuseplug_tools.new.request import request_of
from fuseplug_tools.new.writing import write

PARAMS = ("", "weight", "weight,bias", "weight,bias,eps=1e-5")
WHAT = (*PARAMS, *KNOWN_OPS)
"""What a kernel is for: a new op of modules with these parameters, or an op that exists."""

BREAKS = {
    "inductor": (r"return (_compiled\(|rotated\[0\])", r"return 1.0625 * \1"),
    "triton": (r"tl\.store\((y.*?), (.+), mask=inside\)$", r"tl.store(\1, 1.0625 * (\2), mask=inside)"),
    "npu": (r"torch\.ops\.npu\.npu_(\w+)\((.*)$", r"1.0625 * torch.ops.npu.npu_\1(\2"),
}
"""For each backend, a part of ``backend.py`` and a replacement that makes its results wrong."""

_ENTRY_POINT = re.compile(r'^(\w+) = "([\w.]+:\w+)(?: \[\w+\])?"$', re.MULTILINE)


def generate(folder: Path, backend: str, what: str) -> Path:
    """Write a distribution into *folder*, and beside its source what ``pip install`` records about its kernels."""
    op, params = (what, "") if what in KNOWN_OPS else ("", what)
    request = request_of("my-op", op=op, backend=backend, params=params)
    write(request, folder)
    info = folder / "src" / f"{request.package}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {request.distribution}\nVersion: 0.1.0\n")
    # Without the extra: whether its requirement is installed is up to the environment.
    (kernel,) = _ENTRY_POINT.findall((folder / "pyproject.toml").read_text())
    (info / "entry_points.txt").write_text(f"[fuseplug.kernels]\n{' = '.join(kernel)}\n")
    return folder


def broken(folder: Path, backend: str) -> Path:
    """Change the kernel of the distribution so that its results are off by a sixteenth."""
    (path,) = folder.glob("src/*/backend.py")
    before = path.read_text()
    path.write_text(re.sub(*BREAKS[backend], before, flags=re.MULTILINE))
    assert path.read_text() != before
    return folder


def run_tests(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of the distribution in *folder* in a process of their own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "FUSEPLUG_"))}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    command += ["--show-capture=no", "-W", "ignore::DeprecationWarning"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900)


def passes_until_broken(folder: Path, backend: str, *options: str) -> None:
    """Assert that the tests of the distribution pass, and fail once its kernel is `broken`."""
    done = run_tests(folder, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "failed" not in done.stdout
    done = run_tests(broken(folder, backend), *(options or ("-k", "conformance")))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "off by" in done.stdout or "not close" in done.stdout or "AssertionError" in done.stdout, done.stdout
