"""Users' commands under ``fuseplug run``: 20 steps unfused and fused, in scripts that do not mention Fuseplug.

The kernels are the compiled ones, and the calls are large enough for them. tests/run has the same with a kernel that
computes the original's bits.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.commands import completed, fuseplug_run, torchrun
from support.tokens import number_tokenizer

from fuseplug_tools.run.command import INJECTED

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.xdist_group("commands"),  # each finds the programs that an earlier one compiled
]

SCRIPTS = Path(__file__).parent / "scripts"
LLAMAFACTORY = Path(sys.executable).with_name("llamafactory-cli")
FOR_LLAMAFACTORY = ("llamafactory", "omegaconf", "torchdata", "datasets")
STEPS = 20
NORMS, ROTATIONS, MLPS = 5, 2, 2
ONCE = NORMS + ROTATIONS + MLPS
# A checkpointed layer is computed again up to the last missing result: its MLP's input.
CHECKPOINTED = ONCE + 2 * 2 + ROTATIONS
HEAD = 1  # TRL's own head
# A reentrant checkpoint computes whole layers again. The last norm is in no layer.
REENTRANT = 2 * ONCE - 1

RECORDING = """
import json, os, sys
with open(os.path.join(os.environ["STARTED"], str(os.getpid())), "w") as file:
    json.dump(["FUSEPLUG_RUN" in os.environ, sys.path, sorted(sys.modules)], file)
"""
"""The user's own sitecustomize. It records the state of every Python that starts, in a file with the process's number.
``fuseplug run`` becomes the command, so both have one number."""


@dataclass(frozen=True)
class Command:
    """A command, and what is expected of it.

    Attributes:
        line: Makes the command line from the folder of the model and the folder for the output.
        calls: How many calls the kernels compute in one step.
        trained: The class of the model that is fused.
        needs: The modules that the command needs.
        log: The file with the losses.
        says: The beginnings of the lines that are logged before the line about the model.
    """

    line: object
    calls: int = ONCE
    trained: str = "LlamaForCausalLM"
    needs: tuple[str, ...] = ("accelerate",)
    log: str = "trainer_state.json"
    says: tuple[str, ...] = ()


def script(name):
    return lambda model, out: (sys.executable, SCRIPTS / name, model, out)


def of_llamafactory(model):
    return {
        "model": str(model),
        "template": "chatml",
        "train_dataset": str(model / "messages.jsonl"),
        "micro_batch_size": 8,
        "global_batch_size": 16,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "bf16": False,
        "batching_workers": 0,
        "enable_activation_checkpointing": False,
    }


def llamafactory(model, out):
    options = {**of_llamafactory(model), "output_dir": out}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return (LLAMAFACTORY, "sft", *words)


def llamafactory_with_kernels(model, out):
    """LLaMA-Factory has no kernels for CPUs. This was also run by hand with its kernels for NPUs, in host memory."""
    file, kernels = model / "train.yaml", {"name": "auto", "include_kernels": "auto"}
    file.write_text(json.dumps({**of_llamafactory(model), "kernel_config": kernels}))  # JSON is YAML, too
    return (LLAMAFACTORY, "train", file, f"output_dir={out}")


def swift(model, out):
    options = {
        "model": model,
        "model_type": "llama",
        "template": "chatml",
        "tuner_type": "full",
        "dataset": model / "chat.jsonl",
        "split_dataset_ratio": 0,
        "output_dir": out,
        "add_version": False,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "torch_dtype": "float32",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "check_model": False,  # the check asks a server
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return (Path(sys.executable).with_name("swift"), "sft", *words)


COMMANDS = {
    "python train.py": Command(script("train.py")),
    "python sft.py, with LoRA": Command(
        script("sft.py"),
        CHECKPOINTED + HEAD,
        trained="PeftModel",
        needs=("trl", "datasets", "peft"),
        says=("trl.trainer.utils._fused_forward is the forward of base_model.model, and its",),
    ),
    "python dpo.py": Command(
        script("dpo.py"),
        CHECKPOINTED + HEAD,
        needs=("trl", "datasets"),
        says=("trl.trainer.utils._fused_forward is the forward of the model, and its",),
    ),
    "torchrun shard.py": Command(
        lambda model, out: torchrun(SCRIPTS / "shard.py", model, out), trained="FSDPLlamaForCausalLM"
    ),
    "llamafactory-cli sft": Command(llamafactory, 2 * ONCE, needs=FOR_LLAMAFACTORY, log="trainer_log.jsonl"),
    "llamafactory-cli train, with kernel_config": Command(
        llamafactory_with_kernels,
        2 * ONCE,
        needs=FOR_LLAMAFACTORY,
        log="trainer_log.jsonl",
        says=("LLaMA-Factory's kernel_config chooses Fuseplug's kernels",),
    ),
    "swift sft": Command(
        swift, REENTRANT, needs=("swift", "modelscope", "json_repair", "einops", "aiohttp", "PIL"), log="logging.jsonl"
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a small model, its tokenizer and texts."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2),
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    number_tokenizer(64).save_pretrained(folder)
    # Eight texts make a call large enough for a compiled program.
    texts = [" ".join(str(3 + n * k % 61) for k in range(1, 129)) for n in range(3, 43)]

    def say(role, text):
        return {"role": role, "content": [{"type": "text", "value": text}]}

    lines = {
        "text": [{"text": text} for text in texts],
        "pairs": [{"prompt": "3 4 5", "chosen": text, "rejected": "9 8 7"} for text in texts],
        "messages": [{"messages": [say("user", "3 4 5"), say("assistant", text)]} for text in texts],
        "chat": [
            {"messages": [{"role": "user", "content": "3 4 5"}, {"role": "assistant", "content": text}]}
            for text in texts
        ],
    }
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def run(tmp_path, kept):
    """Run a command in a folder of its own.

    ``run(name, how, line)``, where ``line(folder)`` is the command and *how* runs it, returns the folder, the text on
    stderr, and the state of each Python when it started.
    """
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(RECORDING)

    def run(name, how, line):
        folder, started = tmp_path / name, tmp_path / f"{name}-started"
        folder.mkdir()
        started.mkdir()
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "STARTED": str(started),
            "FUSEPLUG_CACHE": str(kept),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(kept / "datasets"),
            "MODELSCOPE_CACHE": str(kept / "modelscope"),
            "DISABLE_VERSION_CHECK": "1",  # otherwise LLaMA-Factory insists on older versions of other packages
            "USE_V1": "1",
            "DS_ACCELERATOR": "cpu",  # TRL imports DeepSpeed where it is installed
        }
        done = how(*line(folder / "out"), env=env)
        assert done.returncode == 0, done.stderr
        return folder / "out", done.stderr, [json.loads(each.read_text()) for each in started.iterdir()]

    return run


def losses(log):
    text = log.read_text()
    rows = [*map(json.loads, text.splitlines())] if log.suffix == ".jsonl" else json.loads(text)["log_history"]
    return torch.tensor([row["loss"] for row in rows if "loss" in row])


def written(folder):
    return {path.relative_to(folder) for path in folder.rglob("*") if "runs" not in path.parts}


@pytest.mark.parametrize("name", COMMANDS)
def test_it_trains_as_unfused_by_kernels_and_leaves_nothing(run, model, tmp_path, name):
    command, report = COMMANDS[name], tmp_path / "report.json"
    if missing := [each for each in command.needs if find_spec(each) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed: nox -s stacks has it")

    def line(out):
        return command.line(model, out)

    assert not any("fuseplug" in Path(word).read_text() for word in map(str, line(".")) if word.endswith(".py"))
    unfused, said, plain = run("unfused", completed, line)
    assert "fuseplug: " not in said
    fused, said, started = run("fused", partial(fuseplug_run, "--report", report, "--"), line)

    want, found = losses(unfused / command.log), losses(fused / command.log)
    assert len(want) == STEPS
    assert want[0] - want[-3:].mean() > 0.1  # so that there is something to compare
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)

    (told,) = json.loads(report.read_text())
    assert (told["model"], told["applied"]) == (command.trained, True)
    assert sum(calls["fused"] for calls in told["calls"]) == command.calls * STEPS
    assert sum(calls["original"] for calls in told["calls"]) == 0
    lines = [line for line in said.splitlines() if line.startswith("fuseplug: ")]
    expected = (*command.says, f"{command.trained}: 9 of 10 targets")
    assert len(lines) == len(expected)
    assert all(line.startswith(f"fuseplug: {begins}") for line, begins in zip(lines, expected, strict=True))

    assert written(fused) == written(unfused)
    usual = set().union(*(modules for *_, modules in plain))
    assert len(started) >= len(plain)
    for inherited, path, modules in started:
        assert inherited
        assert str(INJECTED) not in path
        assert set(modules) - usual <= {"_fuseplug_on_import", "__future__"}
