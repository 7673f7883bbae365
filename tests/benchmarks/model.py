"""Whole models on this machine: unfused, fused by every installed kernel, and compiled by torch.compile.

The models take turns, so that a busy moment meets them all; each is first checked to give the unfused logits. What is
paid once is reported beside: ``apply_all`` with its checks, and the compilation of the whole model.

    python tests/benchmarks/model.py [--repeats N] [--only WORDS]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from record import Table, write
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from fuseplug import manager
from fuseplug.bench import by_turns, spread

UNFUSED = "unfused"
DENSE = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}
MODELS = {
    "Qwen3, 8 layers of Qwen3-0.6B's shape": ("qwen3", DENSE, (512,)),
    "Qwen3-MoE, 4 layers of 32 experts, 4 a token": ("qwen3_moe", DENSE | EXPERTS, (512,)),
    "Qwen3, 8 layers of Qwen3-0.6B, its vocabulary of 151,936": ("qwen3", DENSE | {"vocab_size": 151_936}, (512, 2048)),
}
"""By name: the type, the config, and how many tokens a step has."""

Work = Callable[[nn.Module, Any, Tensor], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--only", default="", help="a part of the name of the models to measure")
    options = parser.parse_args()
    chosen = [(name, tokens) for name, (_, _, each) in MODELS.items() if options.only in name for tokens in each]
    record = f"model-{options.only}" if options.only else "model"
    write(record, [table for name, tokens in chosen for table in measure(name, tokens, options.repeats)])


def measure(name: str, tokens: int, repeats: int) -> list[Table]:
    """Milliseconds of a forward and of a training step, and what is paid once."""
    said = f"{name}, bfloat16, {tokens} tokens"
    ids = torch.randint(8000, (1, tokens), generator=torch.Generator().manual_seed(0))
    models, once = make_models(name, ids)
    adamw = {key: torch.optim.AdamW(model.parameters(), lr=1e-5) for key, model in models.items()}
    timings = Table(f"{said}, in ms", ("work", "contender", "ms", "× unfused, turn by turn"))
    for work in (forward, training_step):
        contenders = {key: partial(work, model, adamw[key], ids) for key, model in models.items()}
        once |= {f"the first {_said(work)} of {key}": took(run) for key, run in contenders.items()}
        samples = by_turns(contenders, repeats)
        for key, microseconds in samples.items():
            ratios = [u / m for u, m in zip(samples[UNFUSED], microseconds, strict=True)]
            timings.add(_said(work), key, spread([m / 1e3 for m in microseconds]), statistics.median(ratios))
    paid = Table(f"{said}, paid once, in s", ("what", "s"))
    for what, seconds in once.items():
        paid.add(what, seconds)
    return [timings, paid]


def make_models(name: str, ids: Tensor) -> tuple[dict[str, nn.Module], dict[str, float]]:
    model_type, config, _ = MODELS[name]
    torch.manual_seed(0)
    torch.compiler.reset()
    unfused = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).bfloat16()
    fused, compiled = copy.deepcopy(unfused), torch.compile(copy.deepcopy(unfused))
    start = time.perf_counter()
    report = manager.apply_all(fused, allow=["lazy_logits"]).report
    once = {f"apply_all, {len(report.fused)} of {len(report.entries)} targets fused": time.perf_counter() - start}
    with torch.no_grad():
        expected = unfused(ids, use_cache=False).logits.float()
        gap = (fused(ids, use_cache=False).logits.float() - expected).norm() / expected.norm()
    assert gap <= 16 * torch.finfo(torch.bfloat16).eps, f"the fused logits are {gap:.1e} away"
    return {UNFUSED: unfused, "fuseplug": fused, "torch.compile(model)": compiled}, once


def forward(model: nn.Module, adamw: torch.optim.Optimizer, ids: Tensor) -> None:
    with torch.no_grad():
        model(ids, use_cache=False)


def training_step(model: nn.Module, adamw: torch.optim.Optimizer, ids: Tensor) -> None:
    model(ids, labels=ids, use_cache=False).loss.backward()
    adamw.step()
    adamw.zero_grad()


def _said(work: Work) -> str:
    return work.__name__.replace("_", " ")


def took(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
