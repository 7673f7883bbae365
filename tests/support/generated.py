"""Distributions that ``fuseplug new`` has written: used as if they were installed, and broken on purpose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from fuseplug.new.asked import asked
from fuseplug.new.writing import write

ENTRY_POINT = re.compile(r'^(\w+) = "([\w.]+:\w+)(?: \[\w+\])?"$', re.MULTILINE)

PARAMS = ("", "weight", "weight,bias", "weight,bias,eps=1e-5")
OPS = ("rmsnorm", "swiglu", "rope", "moe")
BREAKS = {
    "inductor": ("* 1.0625", r"return (_compiled\(.*\))", r"return \1 * 1.0625"),
}


def generate(folder: Path, name: str, *, op: str = "", backend: str = "inductor", params: str = "") -> Path:
    """Write a distribution into *folder*, and beside its source what ``pip install`` leaves behind of its kernels."""
    request = asked(name, op=op, backend=backend, params=params)
    write(request, folder)
    info = folder / "src" / f"{request.package}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {request.distribution}\nVersion: 0.1.0\n")
    # Without the extra: its requirement is that of the environment, which has what it has.
    (kernel,) = ENTRY_POINT.findall((folder / "pyproject.toml").read_text())
    (info / "entry_points.txt").write_text(f"[fuseplug.kernels]\n{' = '.join(kernel)}\n")
    return folder


def run_tests(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of the distribution in *folder* in a process of their own."""
    path = os.pathsep.join([str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--show-capture=no", "-W", "ignore::DeprecationWarning", *options]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
