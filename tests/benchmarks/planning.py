"""Times ``apply_all`` on models too large to build, and shows that rounds of apply and undo leave nothing behind.

``nox -s bench`` runs it. The large models are on meta, so only the walk is timed, with every installed kernel.
"""

from __future__ import annotations

import gc
import time

import psutil
import torch
from record import Table, write
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from fuseplug import manager
from fuseplug_tools.bench import spread

QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}

ROUNDS = 8


def main() -> None:
    models = {f"Qwen3-8B shape, {n} layers": Qwen3Config(**QWEN3_8B, num_hidden_layers=n) for n in (36, 72, 144)}
    models["Qwen3-30B-A3B shape, 48 layers"] = Qwen3MoeConfig(**QWEN3_30B_A3B, num_hidden_layers=48)
    table = Table("apply_all on meta, in s", ("model", "modules", "fused", "seconds"))
    for name, config in models.items():
        table.add(name, *planned(config))
    rounds = Table(f"{ROUNDS} rounds of apply and undo, tiny Qwen3", ("what", "value"))
    for what, value in cycles(ROUNDS).items():
        rounds.add(what, value)
    write("planning", [table, rounds])


def planned(config: AutoConfig, repeats: int = 5) -> tuple[int, int, dict[str, float]]:
    """The number of modules, the number of fused targets, and the spread of the seconds that `apply_all` takes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    seconds = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        applied = manager.apply_all(model)
        seconds.append(time.perf_counter() - start)
        fused = len(applied.report.fused)
        applied.undo()
    # The first call also imports what planning needs. It counts, because a user waits for it, too.
    return sum(1 for _ in model.modules()), fused, spread(seconds)


def cycles(count: int) -> dict[str, object]:
    """Apply and undo *count* times; return what grew, and whether the model computes the same bits as before."""
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, head_dim=16)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(0, 256, (2, 64))
    with torch.no_grad():
        before = model(tokens).logits
    for _ in range(10):
        manager.apply_all(model).undo()
    objects, memory, seconds = census(), psutil.Process().memory_info().rss, []
    for _ in range(count):
        start = time.perf_counter()
        manager.apply_all(model).undo()
        seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        after = model(tokens).logits
    return {
        "Python objects more": census() - objects,
        "resident memory more (KiB)": (psutil.Process().memory_info().rss - memory) // 1024,
        "bitwise as before": torch.equal(before, after),
        "a round takes (s)": spread(seconds),
    }


def census() -> int:
    """The number of live objects."""
    gc.collect()
    return len(gc.get_objects())


if __name__ == "__main__":
    main()
