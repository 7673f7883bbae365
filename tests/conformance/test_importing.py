"""A fresh Python finds what an import does to a process, and names all of it."""

import os
import sys

import pytest

from fuseplug_testing.importing.fresh_python import ask

LIGHT = {
    "print('hello')": "prints 'hello'",
    "import os; os.environ['X_RUDE'] = '1'": "writes the environment variable X_RUDE",
    "import os; os.environ['X_THERE'] = '1'": "writes the environment variable X_THERE",
    "import warnings; warnings.simplefilter('error')": "changes warnings.filters",
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
    "import threading, time; threading.Thread(target=time.sleep, args=(1,), daemon=True).start()": "starts a thread",
}
OF_TORCH = {
    "import torch; torch.set_default_dtype(torch.float64)": "changes the default dtype",
    "import torch; torch.set_default_device('meta')": "changes the default device",
    "import torch; torch.set_grad_enabled(False)": "changes torch.is_grad_enabled()",
    "import torch; torch.use_deterministic_algorithms(True)": "changes torch.are_deterministic_algorithms_enabled()",
    "import torch; torch.set_num_threads(7)": "changes torch.get_num_threads()",
    "import torch; torch.set_float32_matmul_precision('medium')": "changes torch.get_float32_matmul_precision()",
    "import torch; torch.autograd.set_detect_anomaly(True)": "changes torch.is_anomaly_enabled()",
    "import torch; torch.backends.cudnn.benchmark = True": "changes torch.backends.cudnn.benchmark",
    "import torch; torch._C._set_mkldnn_enabled(False)": "changes torch.backends.mkldnn.enabled",
    "import torch; torch.manual_seed(90125)": "changes torch's random state",
    "import torch; torch.nn.functional.silu = print": "replaces torch.nn.functional.silu",
    "import torch; torch.Tensor.relu = print": "replaces Tensor.relu",
    "import torch; torch.nn.Module.train = print": "replaces Module.train",
}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A function that imports a module with a given text, and returns the effects that were found."""

    def ask_about(text):
        (tmp_path / "rude.py").write_text(text)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        monkeypatch.setenv("X_THERE", "0")
        return ask("rude", [])

    return ask_about


def test_everything_that_one_import_does_is_named(asked):
    environ = dict(os.environ)
    said = "\n".join(asked("\n".join(LIGHT)))
    assert [what for what in LIGHT.values() if f"importing rude {what}" not in said] == []
    assert {name: value for name, value in os.environ.items() if name != "X_THERE"} == environ


@pytest.mark.thorough
def test_everything_that_it_does_to_torch_is_named(asked, monkeypatch):
    monkeypatch.setattr("fuseplug_testing.importing.fresh_python.LONGEST", 60.0)  # torch takes seconds
    said = "\n".join(asked("\n".join(OF_TORCH)))
    assert "importing rude imports torch: import it in match() or later" in said
    assert [what for what in OF_TORCH.values() if f"importing rude {what}" not in said] == []


def test_what_is_written_past_python_is_named(asked):
    assert "prints 'low'" in "\n".join(asked("import os; os.write(2, b'low')"))


def test_an_import_without_end_is_named(asked, monkeypatch):
    monkeypatch.setattr("fuseplug_testing.importing.fresh_python.LONGEST", 2.0)
    (said,) = asked("import time; time.sleep(60)")
    assert "takes longer than 2 s" in said


@pytest.mark.parametrize("text", ["", "import math"])
def test_a_well_behaved_import_does_nothing(asked, text):
    assert asked(text) == []
