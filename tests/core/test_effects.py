"""What the import of a plug-in does to the process is undone where it can be, and named."""

from __future__ import annotations

import json
import os
import sys
import threading
import types
import warnings

import pytest
import torch

from fuseplug import KernelManager
from fuseplug.discovery import discover
from fuseplug.importing.effects import watched
from fuseplug.importing.settings import of_python, of_torch

KERNEL = """
from fuseplug import BaseKernel

class Kernel(BaseKernel):
    kernel_id = "rude"
    op = function = reference = "a:b"

    def match(self, site):
        return None
"""

UNDONE = {
    "print('hello')": "prints 'hello'",
    "import sys; sys.stderr.write('hello')": "prints 'hello'",
    "import os; os.environ['X_RUDE'] = '1'": "writes the environment variable X_RUDE",
    "import os; os.environ['X_THERE'] = '1'": "writes the environment variable X_THERE",
    "import os; del os.environ['X_THERE']": "writes the environment variable X_THERE",
    "import os; os.environ['TRITON_INTERPRET'] = '1'": "writes the environment variable TRITON_INTERPRET",
    "import warnings; warnings.simplefilter('error')": "changes warnings.filters",
    "import warnings; warnings.resetwarnings()": "changes warnings.filters",
    "import sys; sys.path.insert(0, 'elsewhere')": "changes sys.path",
    "import sys; sys.excepthook = print": "changes sys.excepthook",
    "import sys; sys.setrecursionlimit(12345)": "changes sys.getrecursionlimit()",
    "import threading; threading.excepthook = print": "changes threading.excepthook",
    "import random; random.seed(90125)": "changes random's state",
    "import logging; logging.basicConfig(level=10, force=True)": "changes the root logger's level",
    "import logging; logging.disable()": "changes what logging.disable() disables",
    "import gc; gc.disable()": "changes gc.isenabled()",
    "import gc; gc.set_threshold(7)": "changes gc.get_threshold()",
    "import os; os.chdir('/')": "changes the working directory",
    "import builtins; builtins.rude = 1": "changes the names in builtins",
    "import signal; signal.signal(signal.SIGUSR1, print)": "changes the handler of SIGUSR1",
    "import torch; torch.set_default_dtype(torch.float64)": "changes the default dtype",
    "import torch; torch.set_default_device('meta')": "changes the default device",
    "import torch; torch.set_grad_enabled(False)": "changes torch.is_grad_enabled()",
    "import torch; torch.use_deterministic_algorithms(True)": "changes torch.are_deterministic_algorithms_enabled()",
    "import torch; torch.set_num_threads(7)": "changes torch.get_num_threads()",
    "import torch; torch.set_float32_matmul_precision('medium')": "changes torch.get_float32_matmul_precision()",
    "import torch; torch.set_autocast_enabled('cpu', True)": "changes torch.is_autocast_enabled('cpu')",
    "import torch; torch.autograd.set_detect_anomaly(True)": "changes torch.is_anomaly_enabled()",
    "import torch; torch.backends.cudnn.benchmark = True": "changes torch.backends.cudnn.benchmark",
    "import torch; torch.manual_seed(90125)": "changes torch's random state",
    "import torch; torch.nn.functional.silu = print": "replaces torch.nn.functional.silu",
    "import torch; torch.Tensor.relu = print": "replaces Tensor.relu",
    "import torch; torch.nn.Module.train = print": "replaces Module.train",
}
LASTING = {
    "import threading, time; threading.Thread(target=time.sleep, args=(1,), daemon=True).start()": "starts a thread",
    "import time; time.sleep(0.6)": " takes ",
}


def settings():
    return of_python() | of_torch(torch, compilers=False)


def rude():
    (record,) = (record for record in discover({}) if record.distribution == "x-rude")
    return record


@pytest.fixture
def _there(monkeypatch, site):
    monkeypatch.setenv("X_THERE", "0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("fuseplug.importing.effects.PATIENCE", 600.0)  # on a busy machine


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize(
    ("text", "ending"),
    [*((text, "") for text in UNDONE), *((text, end) for text in list(UNDONE)[::9] for end in ("1 / 0", "exit(3)"))],
)
def test_what_can_be_undone_is_undone_and_named(package, capsys, text, ending):
    package("x-rude", "rude", source=f"{KERNEL}{text}\n{ending}")
    before, environ = settings(), dict(os.environ)
    functions = [torch.nn.functional.silu, torch.Tensor.relu, torch.nn.Module.train, sys.stdout, sys.stderr]
    record = rude()
    assert record.state == ("broken" if ending else "ready")
    effects = [effect for effect in record.effects if " takes " not in effect.what]  # on a busy machine
    assert all(effect.undone for effect in effects)
    assert any(effect.what.startswith(f"importing x_rude {UNDONE[text]}") for effect in effects)
    now = settings()  # numpy's are new where the import brought numpy
    assert {name: now[name] for name in before} == before
    assert dict(os.environ) == environ
    then = [torch.nn.functional.silu, torch.Tensor.relu, torch.nn.Module.train, sys.stdout, sys.stderr]
    assert all(there is was for there, was in zip(then, functions, strict=True))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("text", LASTING)
def test_what_cannot_be_undone_is_named(package, text):
    package("x-rude", "rude", source=KERNEL + text)
    assert any(LASTING[text] in effect.what and not effect.undone for effect in rude().effects)


def test_a_well_behaved_kernel_does_nothing(package):
    package("x-rude", "rude", source=KERNEL)
    assert not [effect for effect in rude().effects if " takes " not in effect.what]


def test_what_another_thread_draws_meanwhile_is_not_drawn_again(package):
    package("x-rude", "rude", source=KERNEL + "import time; time.sleep(0.05)")
    drawn, done = [], threading.Event()

    def draw():
        while not done.is_set():
            drawn.append(torch.rand(()).item())

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        record = rude()
    finally:
        done.set()
        thread.join()
    assert not [effect for effect in record.effects if "random" in effect.what]
    assert len(set(drawn)) > 0.99 * len(drawn)  # float32 has few numbers, so that some come twice


@pytest.mark.usefixtures("_there")
def test_everything_that_one_import_does_is_named(package):
    package("x-rude", "rude", source=KERNEL + "\n".join(UNDONE))
    said = "\n".join(effect.what for effect in rude().effects)
    for text, what in UNDONE.items():
        assert what in said or "prints" in what, text


def test_interrupted_it_is_undone_all_the_same(package):
    package("x-rude", "rude", source="import torch; torch.set_default_dtype(torch.float64); raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt, match="interrupted while importing kernel x-rude:rude"):
        rude()
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("lazy", [False, True])
def test_one_that_is_imported_is_watched_only_if_it_runs_code_for_a_name(monkeypatch, capsys, lazy):
    module = types.ModuleType("mine")
    if lazy:
        module.__getattr__ = lambda name: print("hello")
    monkeypatch.setitem(sys.modules, "mine", module)
    with watched("mine", "x:mine") as effects:
        getattr(module, "Kernel", None)
    assert [effect.what for effect in effects] == ["importing mine prints 'hello'"] * lazy
    assert capsys.readouterr().out == ""


def test_a_stream_that_is_kept_by_what_heard_it_goes_on(capsys):
    with watched("mine", "x:mine") as effects:
        kept = sys.stdout
        print("heard")
        other = threading.Thread(target=print, args=("from another thread",))
        other.start()
        other.join()
    kept.write("afterwards\n")
    assert [effect.what for effect in effects] == ["importing mine prints 'heard'"]
    assert capsys.readouterr().out == "from another thread\nafterwards\n"


def test_what_is_warned_about_within_is_told_as_ever():
    """A kernel that looks for its compiler may warn, which is not to print."""
    with pytest.warns(UserWarning, match="mine"), watched("mine", "x:mine") as effects:
        warnings.warn("mine", stacklevel=1)
    assert effects == []


DTYPE = KERNEL + "import torch; torch.set_default_dtype(torch.float64)"


class TestCommand:
    def test_list_names_it(self, package, fresh_python):
        package("x-rude", "rude", source=KERNEL + "import os; os.environ['X_RUDE'] = '1'; print('hello')")
        done = fresh_python("-m", "fuseplug", "list", FUSEPLUG_ALLOW="x-rude", COLUMNS="200")
        told = [line.strip() for line in done.stdout.splitlines()]
        assert told[-4:-1] == [
            "x-rude:rude tried to change this process",
            "importing x_rude prints 'hello' (undone)",
            "importing x_rude writes the environment variable X_RUDE (undone)",
        ]

    def test_json(self, package, fresh_python):
        package("x-rude", "rude", source=KERNEL + "print('hello')")
        (record,) = json.loads(fresh_python("-m", "fuseplug", "list", "--json", FUSEPLUG_ALLOW="x-rude").stdout)[-1:]
        assert record["effects"] == [{"what": "importing x_rude prints 'hello'", "undone": True}]

    def test_doctor_fails_for_what_lasts(self, package, fresh_python):
        """The import of torch lasts. What was set in it, by whoever was first to import it, is undone."""
        package("x-rude", "rude", source=DTYPE)
        done = fresh_python("-m", "fuseplug", "doctor", "--json", FUSEPLUG_ALLOW="x-rude")
        assert done.returncode == 1
        row = next(row for row in json.loads(done.stdout) if row["name"] == "rude")
        assert row["state"] == "fail"
        assert "importing x_rude imports torch: import it in match() or later" in row["found"]
        assert row["found"].count("changes the default dtype") == 1

    def test_doctor_warns_of_what_was_undone(self, package, fresh_python):
        package("x-rude", "rude", source=KERNEL + "print('hello')")
        done = fresh_python("-m", "fuseplug", "doctor", "--json", FUSEPLUG_ALLOW="x-rude")
        assert done.returncode == 0
        row = next(row for row in json.loads(done.stdout) if row["name"] == "rude")
        assert (row["state"], row["found"].count("prints 'hello'")) == ("warn", 1)


def test_torch_that_a_plugin_imports_first_is_left_with_its_own_settings(package, fresh_python):
    package("x-rude", "rude", source=DTYPE)
    code = "import torch, fuseplug; fuseplug.manager.kernels(); print(torch.get_default_dtype())"
    for order in (code, code.replace("import torch, fuseplug; fuseplug.manager.kernels()", "{}")):
        text = order.format("import fuseplug; fuseplug.manager.kernels(); import torch")
        assert fresh_python(text).stdout == "torch.float32\n"


def test_a_kernel_that_is_planned_for_elsewhere_is_watched_too(package):
    text = KERNEL + "import torch; torch.set_default_dtype(torch.float64)"
    package("x-rude", "rude", source=text, extras="[npu]", requires=["no-such-thing; extra == 'npu'"])
    KernelManager({}).plan(torch.nn.Linear(1, 1), device="npu")
    assert "x_rude" in sys.modules
    assert torch.get_default_dtype() is torch.float32
