"""Training scripts under ``fuseplug run``, in their own processes: kernels compute the same losses."""

import json
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import torchrun

SCRIPT = Path(__file__).parent / "training.py"
SITES, STEPS = 5, 3


def losses(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_loop_trains_fused_and_unchanged(fuseplug_run):
    script = runpy.run_path(str(SCRIPT))
    unfused = script["in_a_loop"](script["build"]())
    done = fuseplug_run("--", sys.executable, SCRIPT, "loop")
    assert losses(done)["loop"] == {"losses": unfused, "calls": SITES * STEPS}
    assert "fuseplug: LlamaForCausalLM: 5 of 5 targets fused for training on cpu; " in done.stderr


@pytest.mark.thorough
def test_a_script_serves_fused_and_unchanged(fuseplug_run):
    command = ("--", sys.executable, SCRIPT, "generate,generate_batch")
    done = fuseplug_run("--mode", "inference", *command)
    fused = losses(done)
    unfused = losses(fuseplug_run(*command))  # for training, so nothing is fused
    assert {each["calls"] for each in unfused.values()} == {0}
    assert fused == {way: {**each, "calls": SITES * STEPS} for way, each in unfused.items()}
    assert done.stderr.count("fuseplug: LlamaForCausalLM: 5 of 5 targets fused for inference on cpu; ") == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ways", "models"),
    [("trainer,loop", ["LlamaForCausalLM"]), ("accelerate,adapted", ["LlamaForCausalLM", "PeftModel"])],
)
def test_a_script_trains_fused_and_unchanged(fuseplug_run, tmp_path, ways, models):
    command = ("--", sys.executable, SCRIPT, ways, tmp_path)
    report = tmp_path / "report.json"
    done = fuseplug_run("--report", report, *command)
    fused = losses(done)
    unfused = losses(fuseplug_run(*command, FUSEPLUG_AUTO="off"))
    assert {each["calls"] for each in unfused.values()} == {0}
    # The fused norm is the reference, which computes the bits of the original.
    assert {way: each["losses"] for way, each in fused.items()} == {w: each["losses"] for w, each in unfused.items()}
    assert {way: each["calls"] for way, each in fused.items()} == dict.fromkeys(fused, SITES * STEPS)
    lines = [line for line in done.stderr.splitlines() if line.startswith("fuseplug: ")]
    assert [line.partition(" targets")[0] for line in lines] == [f"fuseplug: {model}: 5 of 5" for model in models]
    assert [each["model"] for each in json.loads(report.read_text())] == models


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["fsdp2", "fsdp1", "ddp"])
def test_two_ranks_train_fused_and_unchanged(fuseplug_run, environ, way, tmp_path):
    report = tmp_path / "report.json"
    done = fuseplug_run("--report", report, "--", *torchrun(SCRIPT, way))
    fused = losses(done)[way]
    unfused = losses(subprocess.run(torchrun(SCRIPT, way), capture_output=True, text=True, env=environ, timeout=300))[
        way
    ]
    assert fused["losses"] == unfused["losses"]
    assert (fused["calls"], unfused["calls"]) == (SITES * STEPS, 0)
    assert done.stderr.count("fuseplug: ") == 1
    assert len(json.loads(report.read_text())) == 1


FSDP2 = "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
LAYERS = "--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer"
LAUNCHED = {
    "--multi_gpu": ("DistributedDataParallel", "Parameter"),  # on a machine without GPUs: several processes
    f"{FSDP2} {LAYERS}": ("FSDPLlamaForCausalLM", "DTensor"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("options", LAUNCHED)
def test_what_accelerate_launches_trains_fused_and_unchanged(fuseplug_run, options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = (sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", port)
    few = ("--num_processes", 2, "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no")
    command = ("--", *launch, *few, SCRIPT, "launched")
    done = fuseplug_run(*command)
    fused = losses(done)["launched"]
    unfused = losses(fuseplug_run(*command, FUSEPLUG_AUTO="off"))["launched"]
    assert fused == {**unfused, "calls": SITES * STEPS}
    assert (fused["wrapped"], fused["parameter"]) == LAUNCHED[options]
    assert unfused["calls"] == 0
    assert done.stderr.count("fuseplug: ") == 1


@pytest.mark.thorough
def test_ranks_that_plan_differently_train_unfused(fuseplug_run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, runpy, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.environ['FUSEPLUG_KERNELS'] = 'none'\n"
        f"sys.argv[0] = {str(SCRIPT)!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [script if each == SCRIPT else each for each in torchrun(SCRIPT, "ddp")]
    done = fuseplug_run("--", *command)
    assert losses(done)["ddp"]["calls"] == 0
    assert "trained unfused on rank 0, because of this: PlanError: the ranks do not plan the same" in done.stderr
    assert "rank 0 would fuse lm_head" in done.stderr or "rank 0 would fuse model." in done.stderr
    failed = fuseplug_run("--strict", "--", *command)
    assert failed.returncode != 0
    assert "the ranks do not plan the same" in failed.stderr
