"""Finds out what importing a kernel does: ``python -m fuseplug_testing.importing.fresh_python …`` in a fresh Python.

The command writes to the file *report*, as JSON, what the import did and must not do. The import may print, hang, end
the process or change its state: all of that stays in this process, and is seen.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuseplug.discovery.import_cost import heavy_since, imports_heavy

from .said import Names, changed, prints, starts_thread, writes_variable
from .settings import of_python, of_torch

LONGEST = 10.0
"""Seconds that importing the module of a kernel's class may take. Without torch it takes milliseconds."""

LONGEST_FUNCTIONS = 300.0
"""Seconds that all imports together may take, with functions and torch: compiling on import takes time."""


def imports_of(module: str, functions: list[str], *, longest: float = LONGEST, before_torch: str = "") -> list[str]:
    """Import *module*, then torch, then *functions* (``"module:name"``); say what each did that it must not do.

    *before_torch* is a function (``"module:name"``) that is called before torch is imported, to set up a device.

    Raises:
        ImportError: If *module* cannot be imported.
    """
    found: list[str] = []
    before, threads = of_python(), threading.active_count()
    faulthandler.dump_traceback_later(longest, exit=True)
    with _written_variables() as written:
        _import(module, module, found)
    faulthandler.cancel_dump_traceback_later()
    heavy = heavy_since()
    if heavy:
        found.append(imports_heavy(module, heavy))
    found += [writes_variable(module, name) for name in sorted(written)]
    if not heavy:  # the module is not to blame for what these imports change: see settings_changed_by
        found += changed(module, before, of_python()).values()
    if threading.active_count() > threads:
        found.append(starts_thread(module))
    _call(before_torch)
    for function in functions:
        from .process_state import ProcessState  # torch only now

        state = ProcessState()
        with contextlib.suppress(ImportError):  # which another check reports
            _import(function.partition(":")[0], function, found)
        found += [f"importing {function} changes the whole process: {what}" for what in state.changed()]
    return found


def settings_changed_by(module: str) -> list[str]:
    """Import torch, then *module*, which also imports it; say which settings and names of torch *module* changes."""
    import torch

    from ..torch_private import import_dynamo

    import_dynamo()
    before, names = of_python() | of_torch(torch), Names(torch)
    importlib.import_module(module)
    changes = changed(module, before, of_python() | of_torch(torch)).values()
    return [*changes, *names.replaced(module)]


def ask(module: str, functions: list[str], *, before_torch: str = "") -> list[str]:
    """Run `imports_of` in a fresh Python that finds the same modules as this one.

    Raises:
        ImportError: If *module* cannot be imported.
    """
    options = (f"--before-torch={before_torch}",)
    said = _in_a_fresh_python(module, functions, *options)
    if any(f"importing {module} imports torch" in what for what in said):
        said += _in_a_fresh_python(module, [], "--torch-first", *options)
    return said


def _call(function: str) -> None:
    """Call the function that ``"module:name"`` names; ``""`` names none."""
    if function:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)()


def _import(module: str, name: str, found: list[str]) -> None:
    printed = _printed()
    try:
        importlib.import_module(module)
    except ImportError:
        raise
    except BaseException as error:  # noqa: BLE001 - a third party's module may raise anything, or exit
        found.append(f"importing {name} raises {type(error).__name__}: {error}")
    if text := _printed()[len(printed) :].strip():
        found.append(prints(name, text))


def _printed() -> str:
    """Everything that this process and its children have written to its stdout and stderr, which are one file."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return os.pread(1, os.fstat(1).st_size, 0).decode(errors="replace")
    except OSError:  # started by hand, at a terminal
        return ""


@contextlib.contextmanager
def _written_variables() -> Iterator[set[str]]:
    """The variables written inside. A comparison could miss some: this process may have inherited the same values."""
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


def _in_a_fresh_python(module: str, functions: list[str], *options: str) -> list[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    options = (*options, f"--longest={LONGEST}")
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report"), Path(folder, "output")
        command = [
            sys.executable,
            "-m",
            "fuseplug_testing.importing.fresh_python",
            *options,
            str(report),
            module,
            *functions,
        ]
        with output.open("w+b") as written:
            try:
                code = subprocess.run(  # noqa: S603 - this very interpreter
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=written,
                    stderr=written,
                    env=environ,
                    check=False,
                    timeout=LONGEST_FUNCTIONS,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        said = json.loads(report.read_text() or "null") if report.exists() else None
        return _read(module, code, said, report.exists(), output.read_text(errors="replace"))


def _read(module: str, code: int | None, said: Any, started: bool, output: str) -> list[str]:
    """Judge a fresh Python by its exit *code* (``None``: stopped), by what it *said*, and by its *output*."""
    if isinstance(said, list):
        hung = [f"a Python that has imported {module} does not end"] if code is None else []
        return [str(each) for each in said] + hung
    last = (output.strip().splitlines() or [f"exit code {code}"])[-1]
    if isinstance(said, str) or not started:
        raise ImportError(said or last)
    if code is None:
        return [f"importing {module} and its functions does not end within {LONGEST_FUNCTIONS:.0f} s"]
    if "Timeout (" in output:
        at = re.search(r'File "(.*)", line (\d+) in <module>', output.partition("Timeout (")[2])
        where = f" ({at[1]}:{at[2]})" if at else ""
        return [f"importing {module} takes longer than {LONGEST:.0f} s{where}: do nothing on import"]
    return [f"importing {module} ends the process with exit code {code}: {last}"]


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before-torch", default="", help="a function, module:name, that is called before torch comes")
    parser.add_argument("--torch-first", action="store_true", help="say which settings the module changes")
    parser.add_argument("--longest", type=float, help="how many seconds importing the module may take")
    parser.add_argument("report", type=Path)
    parser.add_argument("module")
    parser.add_argument("functions", nargs="*")
    given = parser.parse_args()
    given.report.touch()
    try:
        if given.torch_first:
            _call(given.before_torch)
            said: Any = settings_changed_by(given.module)
        else:
            said = imports_of(given.module, given.functions, longest=given.longest, before_torch=given.before_torch)
    except ImportError as error:
        said = str(error)
    given.report.write_text(json.dumps(said))


if __name__ == "__main__":
    _main()
