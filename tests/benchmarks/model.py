"""Times whole models: unfused, unfused again, fused by every installed kernel, and compiled by torch.compile.

It measures what ``fuseplug bench`` measures, for a dense model and a mixture of experts, in two dtypes, from one
decoded token to a training step of 2048 tokens. The ratios show where a fused model is slower than the unfused one.

    python tests/benchmarks/model.py [--repeats N] [--only WORDS] [--dtype float32] [--tokens N] [--versus again]
        [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from record import BOTH, Table, dtypes, write

from fuseplug import manager
from fuseplug_tools.bench import Benchmark, compare

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}
WORK = ("train", "prefill", "decode")
MODELS = {
    "Qwen3, 2 layers of Qwen3-0.6B's shape": (DENSE, BOTH, WORK),
    "Qwen3-MoE, 2 layers of 32 experts, 4 a token": (DENSE | EXPERTS, BOTH, WORK),
    "Qwen3, 2 layers of Qwen3-0.6B, its vocabulary of 151,936": (
        DENSE | {"vocab_size": 151_936},
        ("bfloat16",),
        ("train",),
    ),
}
"""The config, the dtypes and the work, by name. The large vocabulary has one case only: in float32, a step takes a
quarter of a minute, and work other than training computes no loss."""

LARGE = 512
"""The number of tokens from which on the record says where the time of a training step goes."""

TOKENS, VERSUS = (16, 128, 512, 2048), ("again", "compile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="minimum number of turns")
    parser.add_argument("--seconds", type=float, default=6, help="seconds of turns for each cell")
    parser.add_argument("--only", default="", help="a part of the name of the models to measure")
    parser.add_argument(
        "--dtype", choices=BOTH, action="append", help="by default those of the model that the CPU computes in"
    )
    parser.add_argument("--tokens", type=int, action="append", help="by default 16, 128, 512 and 2048")
    parser.add_argument("--versus", action="append", choices=VERSUS, help="by default all")
    options = parser.parse_args()
    how = {
        "tokens": options.tokens or TOKENS,
        "versus": options.versus or VERSUS,
        "repeats": options.repeats,
        "seconds": options.seconds,
    }
    with tempfile.TemporaryDirectory() as compiled:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
        tables = [
            table
            for name, (_, has, _) in MODELS.items()
            if options.only in name
            for dtype in has
            if dtype in (options.dtype or dtypes())
            for table in measure(name, dtype, **how)
        ]
    write("model", tables)


def measure(name: str, dtype: str, **how: Any) -> list[Table]:
    """Tables of the time and memory of each kind of work, of the costs paid once, and of where the time goes."""
    torch.compiler.reset()
    times = Table(f"{name}, {dtype}, in ms", ("work", "tokens", "contender", "ms", "× eager, turn by turn", "peak, MB"))
    paid = Table(f"{name}, {dtype}, paid once, in s", ("what", "s"))
    with tempfile.TemporaryDirectory() as folder:
        config, _, modes = MODELS[name]
        (Path(folder) / "config.json").write_text(json.dumps(config))
        found = compare(
            folder,
            manager,
            dtype=dtype,
            modes=modes,
            allow=["lazy_logits"],
            **how,
        )
    assert found.right, found.checked
    for row in found.rows:
        peak = None if row.peak is None else round(row.peak / 1e6)
        times.add(row.mode, row.tokens, row.contender, row.ms, row.gain, peak)
    for what, seconds in found.once.items():
        paid.add(what, seconds)
    return [times, paid, *(_shares(found, name, dtype, count) for count in how["tokens"] if count >= LARGE)]


def _shares(found: Benchmark, name: str, dtype: str, tokens: int) -> Table:
    """Where the time of a training step goes, by operation: it shows how much is left to fuse between the matmuls."""
    columns = ("operation", "unfused", "fused")
    table = Table(f"{name}, {dtype}, a training step of {tokens} tokens, in % of the unfused step", columns)
    for share in found.shares["train", tokens]:
        table.add(share.operation, 100 * share.before, 100 * share.after)
    return table


if __name__ == "__main__":
    main()
