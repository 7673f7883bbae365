"""The loss of a model with a real vocabulary: time and memory of a training step, with and without its logits."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from progress import progress
from promises import BrokenPromiseError
from timing import Spread
from transformers import Qwen3Config, Qwen3ForCausalLM

from fuseplug import manager
from fuseplug_tools.bench import peak_memory

# Qwen3-0.6B at half its width, with two layers: only its vocabulary matters here.
CONFIG = {
    "vocab_size": 151_936,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TOKENS = 1024
ROUNDS = 5


@dataclass
class Steps:
    """Training steps of one model, without those of the optimizer.

    Attributes:
        loss: The loss of the first step.
        seconds: The duration of each step.
        gigabytes: The peak memory of each step, above what was in use before; empty where the peak is unknown.
    """

    loss: float = 0.0
    seconds: list[float] = field(default_factory=list)
    gigabytes: list[float] = field(default_factory=list)


@dataclass
class Losses:
    """The results for both models.

    Attributes:
        gradient_difference: The distance between the fused and the unfused gradient of the head's weight, relative to
            the norm of the unfused one.
    """

    unfused: Steps
    fused: Steps
    gradient_difference: float
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        return {"config": CONFIG, "tokens": TOKENS, **asdict(self)}


def compare(seed: int, dtype: torch.dtype) -> Losses:
    """Time the steps of two equal models in turns. Both have all other kernels."""
    models = {fused: _build(seed, dtype, fused=fused) for fused in (False, True)}
    tokens = torch.randint(CONFIG["vocab_size"], (1, TOKENS))
    steps = {False: Steps(), True: Steps()}
    gradients = {}
    for number in progress(range(-1, ROUNDS), "taking turns, loss"):
        for fused in (False, True) if number % 2 else (True, False):
            found = _step(models[fused], tokens, steps[fused] if number >= 0 else Steps())
            if number < 0:
                steps[fused].loss = found
                gradients[fused] = models[fused].lm_head.weight.grad.float()
    difference = (gradients[True] - gradients[False]).norm() / gradients[False].norm()
    return Losses(steps[False], steps[True], difference.item(), str(dtype).removeprefix("torch."))


def _build(seed: int, dtype: torch.dtype, *, fused: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).to(dtype)
    report = manager.apply_all(model, allow=["lazy_logits"] if fused else []).report
    if fused != any(entry.op == "linear_cross_entropy" for entry in report.fused):
        raise BrokenPromiseError(f"the loss was not fused as asked. The report:\n{report}")
    return model


def _step(model: Qwen3ForCausalLM, tokens: torch.Tensor, steps: Steps) -> float:
    losses = []

    def run() -> None:
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        steps.seconds.append(time.perf_counter() - start)
        losses.append(loss.item())

    model.zero_grad()
    gc.collect()
    peak = peak_memory(run)
    steps.gigabytes += [] if peak is None else [peak / 1e9]
    return losses[0]


def print_losses(found: Losses) -> None:
    unfused, fused = found.unfused, found.fused
    print(f"  in {found.dtype}, a vocabulary of {CONFIG['vocab_size']:,}, {TOKENS} tokens")
    print(f"  loss                   {unfused.loss:.5f} unfused, {fused.loss:.5f} fused")
    print(f"  gradient of the head   {found.gradient_difference:.1e} apart, relative to its norm")
    print(f"  seconds of a step      {Spread.of(unfused.seconds)} unfused, {Spread.of(fused.seconds)} fused")
    if unfused.gigabytes:
        print(f"  gigabytes at its peak  {Spread.of(unfused.gigabytes)} unfused, {Spread.of(fused.gigabytes)} fused")
