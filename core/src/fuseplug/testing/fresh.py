"""What importing a kernel does, seen in a Python of its own: ``python -m fuseplug.testing.fresh module [function …]``.

The last line it prints is JSON: everything that was done and must not be. With ``--host-npu`` torch is imported with
the stand-in of `fuseplug.testing.npu`, without which it might not be importable.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .npu.loading import is_loaded, load

HEAVY = ("torch", "triton", "torch_npu", "transformers", "jax", "tensorflow")
"""What importing the module of a kernel's class must not import: `fuseplug list` would wait for it."""


HOST_NPU = "--host-npu"


def imports_of(module: str, functions: list[str], *, host_npu: bool = False) -> list[str]:
    """Import *module*, then torch, then *functions* (``"module:name"``); say what each did that it must not do."""
    found = []
    threads = threading.active_count()
    said = io.StringIO()
    with _written_variables() as written, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        importlib.import_module(module)
    heavy = [name for name in HEAVY if name in sys.modules]
    if heavy:
        found.append(f"importing {module} imports {', '.join(heavy)}: import it in match() or later")
    found += [f"importing {module} writes the environment variable {name}" for name in sorted(written)]
    if said.getvalue():
        found.append(f"importing {module} prints {said.getvalue().strip()[:80]!r}")
    if threading.active_count() > threads:
        found.append(f"importing {module} starts a thread")
    if host_npu:
        load()
    for function in functions:
        from .state import ProcessState  # torch only now

        before = ProcessState()
        importlib.import_module(function.partition(":")[0])
        found += [f"importing {function} is felt everywhere: {what}" for what in before.changed()]
    return found


@contextlib.contextmanager
def _written_variables() -> Iterator[set[str]]:
    """The names written to: this process has inherited what the one above it was told, so no difference need show."""
    written: set[str] = set()
    kept = {name: getattr(type(os.environ), name) for name in ("__setitem__", "__delitem__", "setdefault")}

    def noting(write: Callable[..., Any]) -> Callable[..., Any]:
        def noted(environ: Any, name: str, *value: str) -> Any:
            written.add(name)
            return write(environ, name, *value)

        return noted

    for name, write in kept.items():
        setattr(type(os.environ), name, noting(write))
    try:
        yield written
    finally:
        for name, write in kept.items():
            setattr(type(os.environ), name, write)


def ask(module: str, functions: list[str]) -> list[str]:
    """`imports_of` in a fresh Python that finds what this one finds; raises ImportError if *module* is not there."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(  # noqa: S603 - this very interpreter
        [sys.executable, "-m", "fuseplug.testing.fresh", *([HOST_NPU] if is_loaded() else []), module, *functions],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    *_, last = done.stdout.splitlines() or [""]
    if done.returncode or not last.startswith("["):
        raise ImportError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return [str(each) for each in json.loads(last)]


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != HOST_NPU]
    print(json.dumps(imports_of(given[0], given[1:], host_npu=HOST_NPU in sys.argv)))  # noqa: T201
