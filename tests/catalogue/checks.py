"""Checks the kernels of this repository and keeps the results. `nox -s catalogue` does so for each kind.

python tests/catalogue/checks.py inductor|npu|triton [kernel …]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKS = ROOT / "docs" / "results" / "checks"
PROJECTS = (*ROOT.glob("kernel-packages/*/pyproject.toml"), *ROOT.glob("docs/examples/*/pyproject.toml"))
KINDS = {"": "inductor", "npu": "npu", "cuda": "triton"}
"""The kind of a kernel, by the extra that its entry point names."""

LIMIT = 300.0
"""Seconds that one kernel may take."""

_TABLE = re.compile(r'^\[project\.entry-points\."fuseplug\.kernels"\]\n(.*?)(?:^$|\Z)', re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r'^(\w+) *= "[\w.]+:\w+(?: \[(\w+)\])?"$', re.MULTILINE)


def kernels() -> dict[str, str]:
    """The kernels of this repository, with the kind of each."""
    tables = (_TABLE.search(project.read_text()) for project in sorted(PROJECTS))
    return {name: KINDS[extra] for table in tables if table for name, extra in _ENTRY.findall(table[1])}


def main(kind: str, *chosen: str) -> None:
    wanted = [name for name, other in kernels().items() if other == kind and name in (chosen or kernels())]
    CHECKS.mkdir(exist_ok=True)
    for name in wanted:
        print(name, "…", flush=True)
        print("  ", check(kind, name), flush=True)


def check(kind: str, name: str) -> str:
    """Check one kernel in a process of its own, keep the result, and describe it in one line.

    A check that takes too long has no result. An earlier result is deleted in any case.
    """
    file = CHECKS / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, *_launcher(kind, name), "check", name, "--quick", "--json"]
    interpret = {"TRITON_INTERPRET": "1"} if kind == "triton" else {}
    try:
        done = subprocess.run(command, env=os.environ | interpret, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"left out: it takes more than {LIMIT:.0f} s"
    try:
        (result,) = json.loads(done.stdout)
    except ValueError:
        return f"left out: fuseplug check ended with {done.returncode} and no result"
    file.write_text(done.stdout)
    return f"{result['verdict']} in {result['seconds']} s"


def _launcher(kind: str, name: str) -> list[str]:
    if name.startswith("liger"):
        return [str(Path(__file__).with_name("liger_interpreted.py"))]
    return ["-m", "fuseplug_host_npu", "-m", "fuseplug"] if kind == "npu" else ["-m", "fuseplug"]


if __name__ == "__main__":
    main(*sys.argv[1:])
