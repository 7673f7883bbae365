"""Times what ``fuseplug run`` adds to a training script: whole processes of transformers' Trainer, by turns.

The model is tiny. Its calls are too small to gain, so the originals compute them, and only the start takes longer.

    python tests/benchmarks/run.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from record import must_have_kept

SCRIPT = Path(__file__).parents[1] / "stacks" / "scripts" / "train.py"
RUN = (sys.executable, "-m", "fuseplug", "run")

MODEL = """
import json, pathlib, sys, torch
from support.tokens import number_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
folder = pathlib.Path(sys.argv[1])
config = LlamaConfig(
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2),
)
torch.manual_seed(0)
LlamaForCausalLM(config).save_pretrained(folder)
number_tokenizer(64).save_pretrained(folder)
lines = [json.dumps({"text": " ".join(str(3 + n * k % 61) for k in range(1, 13))}) for n in range(40)]
(folder / "text.jsonl").write_text("\\n".join(lines))
"""

WAYS: Mapping[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "python train.py": ((), {}),
    "fuseplug run, with FUSEPLUG_AUTO=off": ((*RUN, "--"), {"FUSEPLUG_AUTO": "off"}),
    "fuseplug run --dry-run, checks kept": ((*RUN, "--dry-run", "--"), {}),
    "fuseplug run, checks kept": ((*RUN, "--"), {}),
}
FIRST = "fuseplug run, nothing kept or compiled"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--first", type=int, default=3, help="how many times to measure the very first run")
    options = parser.parse_args()
    tests = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        model.mkdir()
        subprocess.run([sys.executable, "-c", MODEL, str(model)], check=True, env={**os.environ, "PYTHONPATH": tests})
        took: dict[str, list[tuple[float, float]]] = {}
        for number in range(options.first):
            took.setdefault(FIRST, []).append(measured(model, caches(directory, f"first-{number}"), (*RUN, "--"), {}))
        kept = caches(directory, "first-0")
        must_have_kept(kept["FUSEPLUG_CACHE"])
        for turn in range(options.runs + 1):
            for name, (before, environ) in WAYS.items():
                times = measured(model, kept, before, environ)
                if turn:
                    took.setdefault(name, []).append(times)
    for name, times in took.items():
        cpu, wall = (quartiles(each) for each in zip(*times, strict=True))
        print(f"{name:40}  CPU {cpu}  wall {wall}  n = {len(times)}")


def caches(directory: str, name: str) -> dict[str, str]:
    folder = Path(directory, name)
    return {"FUSEPLUG_CACHE": str(folder / "kept"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}


def measured(
    model: Path, kept: Mapping[str, str], before: Sequence[str], environ: Mapping[str, str]
) -> tuple[float, float]:
    """The CPU seconds of a run, including its finished children, and the seconds by the clock."""
    with tempfile.TemporaryDirectory() as out:
        command = [*before, sys.executable, str(SCRIPT), str(model), out]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **kept, **environ}
        start = time.perf_counter()
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: run it by itself to see why")
    return usage.ru_utime + usage.ru_stime, took


def quartiles(times: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.2f} s ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
