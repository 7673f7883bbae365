"""One training step, and a run of many."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from model import logits
from progress import progress
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

LEARNING_RATE = 3e-3
WARM_UP = 20


@dataclass
class Run:
    """The results of one training run."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out: float = math.nan


def optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def step(model: PreTrainedModel, adamw: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """Forward, backward, clip, update; return the loss."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    adamw.zero_grad()
    return loss.item()


def train(model: PreTrainedModel, batches: Sequence[torch.Tensor], held_out: Sequence[torch.Tensor], label: str) -> Run:
    """Train on *batches* in order, with a warm-up and a cosine decay of the learning rate; then compute the loss of
    *held_out*.
    """
    adamw = optimizer(model)
    decay = torch.optim.lr_scheduler.LambdaLR(
        adamw,
        lambda i: min(1.0, (i + 1) / WARM_UP) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * i / len(batches)))),
    )
    run = Run()
    for tokens in progress(batches, label, lambda: f"loss {run.losses[-1]:.3f}"):
        start = time.perf_counter()
        run.losses.append(step(model, adamw, tokens))
        run.seconds.append(time.perf_counter() - start)
        decay.step()
    run.held_out = _loss(model, held_out)
    return run


def _loss(model: PreTrainedModel, batches: Sequence[torch.Tensor]) -> float:
    losses = [cross_entropy(logits(model, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for tokens in batches]
    return torch.stack(losses).mean().item()
