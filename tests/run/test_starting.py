"""Each Python that a command starts waits for the modules to wrap, and is otherwise unchanged."""

import importlib.util
import json
import os
import signal
import sys

import pytest

from fuseplug_tools.run.command import INJECTED, injected
from fuseplug_tools.run.options import MODULES, RunOptions

STATE = """
import json, sys
waiting = [sorted(f.waiting) for f in sys.meta_path if type(f).__name__ == "OnImport"]
print(json.dumps([waiting, sys.path, sorted(sys.modules), getattr(sys.modules.get("sitecustomize"), "MINE", None)]))
"""


def state(done):
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_it_waits_and_changes_nothing_else(python):
    waiting, path, modules, _ = state(python("-c", STATE))
    nothing, before, without, _ = state(python("-c", STATE, FUSEPLUG_AUTO="off"))
    assert (waiting, nothing) == ([sorted(MODULES)], [])
    assert str(INJECTED) not in path
    assert path == before
    assert modules == without
    plain = state(python("-c", STATE, PYTHONPATH=os.pathsep.join(path[1:])))
    assert set(modules) - set(plain[2]) <= {"_fuseplug_on_import", "__future__"}


@pytest.mark.parametrize("off", ["OFF", "0", "false", "no"])
def test_it_is_turned_off_in_any_of_the_usual_words(python, off):
    assert state(python("-c", STATE, FUSEPLUG_AUTO=off))[0] == []


def test_the_users_own_sitecustomize_still_runs(python, site):
    (site / "sitecustomize.py").write_text("MINE = __file__")
    assert state(python("-c", STATE))[3] == str(site / "sitecustomize.py")


def test_an_error_of_the_users_own_is_shown_as_python_shows_it(python, site):
    (site / "sitecustomize.py").write_text("import what_is_missing")
    said = python("-c", "print('ran')")
    assert said.stdout == "ran\n"
    assert said.stderr.splitlines() == [
        "Error in sitecustomize; set PYTHONVERBOSE for traceback:",
        "ModuleNotFoundError: No module named 'what_is_missing'",
    ]


def test_another_tool_may_do_the_same_and_ask_twice(python, site):
    again = "import sys\nfound = sys.modules.pop('sitecustomize')\nsys.path.insert(0, {!r})\nimport sitecustomize\n"
    (site / "sitecustomize.py").write_text(
        f"import sys\nif not hasattr(sys, 'twice'):\n    sys.twice = True\n    exec({again.format(str(INJECTED))!r})\n"
        "MINE = 'theirs'"
    )
    waiting, _, _, mine = state(python("-c", STATE))
    assert (len(waiting), mine) == (1, "theirs")


def test_children_of_any_kind_inherit_it(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, subprocess, sys\n"
        "def look(_=None):\n"
        "    return [type(f).__name__ for f in sys.meta_path].count('OnImport'), 'torch' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    for kind in ('spawn', 'fork', 'forkserver'):\n"
        "        with multiprocessing.get_context(kind).Pool(1) as pool:\n"
        "            assert pool.map(look, [0]) == [(1, False)], kind\n"
        "    code = \"import sys; print([type(f).__name__ for f in sys.meta_path].count('OnImport'))\"\n"
        "    for options, count in (('-c', '1'), ('-Ic', '0'), ('-Ec', '0'), ('-Sc', '0')):\n"
        "        assert subprocess.check_output([sys.executable, options, code], text=True).strip() == count, options\n"
    )
    done = python(str(script))
    assert (done.returncode, done.stderr) == (0, "")


def test_what_goes_wrong_in_it_keeps_no_process_from_starting(python, site):
    (site / "_fuseplug_on_import.py").write_text("raise RuntimeError('planted')")
    done = python("-c", "import sys; sys.path", PYTHONPATH=os.pathsep.join([str(site), str(INJECTED)]))
    assert done.returncode == 0
    assert "nothing is fused in process" in done.stderr
    assert done.stderr.count("RuntimeError: planted") == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_python_without_fuseplug_says_so(python, site, strict):
    package = site / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "accelerator.py").write_text("VALUE = 1")
    (site / "fuseplug_tools.py").write_text("")  # in place of our package
    code = "import accelerate.accelerator as a; print(a.VALUE, 'exec_module' in vars(a.__loader__))"
    done = python("-c", code, options=RunOptions(strict=strict))
    if strict:
        assert done.returncode == 1
        assert "ModuleNotFoundError" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "1 False\n")
        assert "may train unfused, because " in done.stderr
        assert "could not wrap accelerate.accelerator: ModuleNotFoundError" in done.stderr


@pytest.fixture
def on_import():
    spec = importlib.util.spec_from_file_location("on_import", INJECTED / "_fuseplug_on_import.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_module_is_handed_on_once_it_is_imported(on_import, site, monkeypatch):
    (site / "waited_for.py").write_text("VALUE = 1")
    (site / "failing.py").write_text("raise ValueError('theirs')")
    monkeypatch.syspath_prepend(str(site))
    seen = []

    class Recording(on_import.OnImport):
        def imported(self, name, module):
            seen.append((name, module.VALUE))

    finder = Recording(["waited_for", "failing", "nowhere"])
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.util.find_spec("waited_for") is not None
    assert seen == []
    import waited_for

    for name, error in (("failing", ValueError), ("nowhere", ModuleNotFoundError)):
        with pytest.raises(error):
            importlib.import_module(name)
    assert seen == [("waited_for", 1)]
    assert "exec_module" not in vars(waited_for.__loader__)
    del sys.modules["waited_for"]


def test_the_command_is_what_runs(fuseplug_run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    for dashes in ([], ["--"]):
        done = fuseplug_run(*dashes, sys.executable, script, "--strict", "--", "-x")
        assert (done.returncode, done.stdout) == (7, "['--strict', '--', '-x']\n")


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_a_signal_ends_the_command_itself(fuseplug_run):
    done = fuseplug_run("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 15)")
    assert done.returncode == -signal.SIGTERM


def test_what_cannot_be_done_is_said(fuseplug_run, tmp_path):
    done = fuseplug_run("--", "no-such-command")
    assert (done.returncode, done.stderr) == (127, "fuseplug run: no-such-command: there is no such command\n")
    done = fuseplug_run("--report", tmp_path / "no" / "report.json", "--", "true")
    assert done.returncode == 2
    assert "cannot be written: No such file or directory: name another file" in done.stderr


def test_the_environment_of_the_command():
    options = RunOptions(only=("model.*",), report="r.json", strict=True)
    found = injected({"PYTHONPATH": os.pathsep.join(["a", "", "b"]), "OTHER": "1"}, options)
    assert found["PYTHONPATH"].split(os.pathsep) == [str(INJECTED), "a", "", "b"]
    assert injected(found, options) == found
    assert injected({}, options)["PYTHONPATH"] == str(INJECTED)
    assert found["OTHER"] == "1"
    assert RunOptions.from_environment(found) == options
    assert RunOptions.from_environment({}) == RunOptions()
