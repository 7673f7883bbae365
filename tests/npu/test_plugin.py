"""What a person sees who runs pytest or a script with an NPU in host memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.thorough import thorough

from fuseplug_testing.checks import CHECKS

pytestmark = pytest.mark.usefixtures("host_npu")  # without it, what these tests start has none, either

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def run(tmp_path):
    """Runs Python in an empty directory, as from a fresh shell."""

    def run(*args, **environ):
        kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        environ = {**kept, "PYTHONPATH": TESTS, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environ}
        command = [sys.executable, *args]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=300)

    return run


@pytest.fixture
def run_pytest(run):
    def run_pytest(*args, **environ):
        return run("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *args, **environ)

    return run_pytest


def test_with_the_option_a_suite_for_npus_runs_as_it_is(run, tmp_path):
    """The suite's conftest imports torch, which finds torch_npu by itself; in workers, too."""
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text("import torch\nassert torch.npu.is_available()\n")
    (tmp_path / "test_suite.py").write_text(
        "import torch, torch_npu\n"
        "def test_one(): assert torch_npu.npu_swiglu(torch.ones(2, 4, device='npu')).shape == (2, 2)\n"
        "def test_two(): torch_npu.npu_swiglu(torch.ones(2, 3, device='npu'))\n"
    )
    done = run("-m", "pytest", "-p", "no:cacheprovider", "--fuseplug-host-npu", "-n1")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "ContractError: npu_swiglu: x must be of an even size along dim -1; it is float32[2, 3]" in done.stdout


def test_without_the_option_the_fixtures_do_it_themselves(run_pytest, tmp_path):
    (tmp_path / "test_suite.py").write_text(
        "import sys\n"
        "def test_without(): assert 'torch' not in sys.modules\n"
        "def test_with(host_npu):\n    import torch\n    assert torch.ones(2).npu().sum() == 2\n"
        "    assert host_npu.calls['aten::sum'] == 1\n"
        "def test_fake(fake_npu):\n    import torch\n    assert torch.ones(2, device='npu').device.type == 'npu'\n"
    )
    done = run_pytest()
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_what_is_missing_skips_or_with_the_option_is_an_error(run_pytest, tmp_path):
    (tmp_path / "test_suite.py").write_text("def test_with(host_npu): pass\ndef test_without(): pass\n")
    done = run_pytest("-rs", ASCEND_HOME_PATH="/opt/cann")
    assert "CANN is set up here (ASCEND_HOME_PATH), and is never stood in for" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    done = run_pytest("--fuseplug-host-npu", ASCEND_HOME_PATH="/opt/cann")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--fuseplug-host-npu: CANN is set up here" in done.stderr


@thorough
def test_a_kernel_on_npus_passes_the_conformance_kit(run_pytest):
    done = run_pytest("--fuseplug-host-npu", "--fuseplug-kernel", "conformance.zoo.npu:NpuGated")
    assert f"{len(CHECKS) - 2} passed, 2 skipped" in done.stdout, done.stdout + done.stderr  # as on CPUs


def test_a_kernel_that_is_careless_of_limits_does_not(run_pytest):
    name = "conformance.zoo.npu:CarelessNpuGated"
    done = run_pytest("--fuseplug-host-npu", "--fuseplug-kernel", name, "-k", "shapes or layouts or numbers")
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "raises ContractError: npu_swiglu: x must be not empty" in done.stdout
    assert "raises ContractError: npu_swiglu: x must be contiguous" in done.stdout


def test_outside_no_op_gives_a_result(run):
    """Outside there are no kernels: memory can be allocated and copied, and nothing else works."""
    done = run("-c", OUTSIDE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["10.0", "raised", "raised", "raised", "raised", "raised", "10.0"]


OUTSIDE = """
from fuseplug_host_npu import HostNPU, load
load()
import torch
x = torch.arange(5.0).npu()
with HostNPU():
    print(x.sum().item())
for op in (torch.exp, torch.add, torch.ops.npu.npu_swiglu, torch.ops.npu.npu_rms_norm, torch.softmax):
    given = {torch.exp: (x,), torch.softmax: (x, 0), torch.ops.npu.npu_swiglu: (x[:4],)}.get(op, (x, x))
    try:
        op(*given)
    except RuntimeError:
        print("raised")
print(x.cpu().sum().item())
"""


def test_a_script_runs_as_it_is(run, tmp_path):
    (tmp_path / "beside.py").write_text("DEVICE = 'npu'\n")
    (tmp_path / "script.py").write_text(
        "import sys, torch\nfrom beside import DEVICE\n"
        "print(__name__, sys.argv[1:], torch.ones(3, device=DEVICE).sum().item())\n"
        "torch.ops.npu.npu_swiglu(torch.ones(3, device=DEVICE))\n"
    )
    for started in (["script.py"], ["-m", "script"]):
        done = run("-m", "fuseplug_host_npu", *started, "--steps", "3")
        assert done.stdout.startswith("__main__ ['--steps', '3'] 3.0\n"), done.stderr
        assert "ContractError: npu_swiglu: x must be of an even size" in done.stderr
    done = run("-m", "fuseplug_host_npu", "script.py", ASCEND_HOME_PATH="/opt/cann")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("CANN is set up here")


@thorough
def test_the_trainer_of_transformers_trains(run, tmp_path):
    """The Trainer finds the NPU by itself: nothing in the script is about NPUs."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(TRAIN)
    losses = []
    for options in ([], ["--cpu"]):
        done = run("-m", "fuseplug_host_npu", "train.py", *options)
        assert done.returncode == 0, done.stderr
        device, *values = done.stdout.split()[-4:]
        losses.append([float(value) for value in values])
        assert device == ("cpu" if options else "npu")
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


TRAIN = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(**sizes))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (6, 12))]
options = TrainingArguments("out", max_steps=3, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
                            per_device_train_batch_size=2, learning_rate=1e-2, bf16=False,
                            use_cpu="--cpu" in sys.argv)
trainer = Trainer(model, options, train_dataset=data)
trainer.train()
print()
print(trainer.model.device.type, *[entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
"""
