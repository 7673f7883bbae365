"""What importing a kernel does, seen in a Python of its own: ``python -m fuseplug.testing.fresh module [function …]``.

The last line it prints is JSON; whatever comes before is what the imports printed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading

HEAVY = ("torch", "triton", "torch_npu", "transformers", "jax", "tensorflow")
"""What importing the module of a kernel's class must not import: `fuseplug list` would wait for it."""


def imports_of(module: str, functions: list[str]) -> list[str]:
    """Import *module*, then torch, then *functions* (``"module:name"``); say what each did that it must not do."""
    found = []
    environ, threads = dict(os.environ), threading.active_count()
    importlib.import_module(module)
    heavy = [name for name in HEAVY if name in sys.modules]
    if heavy:
        found.append(f"importing {module} imports {', '.join(heavy)}: import it in match() or later")
    found += _left_behind(module, environ, threads)
    for function in functions:
        from .state import ProcessState  # torch only now

        before = ProcessState()
        importlib.import_module(function.partition(":")[0])
        found += [f"importing {function} is felt everywhere: {what}" for what in before.changed()]
    return found


def _left_behind(module: str, environ: dict[str, str], threads: int) -> list[str]:
    found = []
    if changed := sorted(name for name, _ in environ.items() ^ os.environ.items()):
        found.append(f"importing {module} changes environment variables: {', '.join(dict.fromkeys(changed))}")
    if threading.active_count() > threads:
        found.append(f"importing {module} starts a thread")
    return found


def ask(module: str, functions: list[str]) -> list[str]:
    """`imports_of` in a fresh Python that finds what this one finds; raises ImportError if *module* is not there."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(  # noqa: S603 - this very interpreter
        [sys.executable, "-m", "fuseplug.testing.fresh", module, *functions],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    *printed, last = done.stdout.splitlines() or [""]
    if done.returncode or not last.startswith("["):
        raise ImportError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    found = [str(each) for each in json.loads(last)]
    if said := "\n".join(printed) + done.stderr:
        found.append(f"importing {module} or its functions prints {said.strip()[:80]!r}")
    return found


if __name__ == "__main__":
    print(json.dumps(imports_of(sys.argv[1], sys.argv[2:])))  # noqa: T201
