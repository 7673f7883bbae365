"""Finds out which of two models is faster, on a machine that others may be using."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from model import logits
from progress import progress
from training import optimizer, step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

TRAINING = "training step"
FORWARD = "forward only"

WARM_UP = 4
ENOUGH_ROUNDS = 8
ENOUGH_SECONDS = 20.0


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        digits = 2 if self.median < 10 else 1
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclass
class Race:
    """The seconds that one task took, unfused and fused, in turns.

    Each unfused run has a fused run next to it in time, and the speed-up is the median over these pairs: whatever slows
    the machine for a while slows both.
    """

    name: str
    dtype: str
    tokens: int
    unfused: list[float] = field(default_factory=list)
    fused: list[float] = field(default_factory=list)

    @property
    def speed_up(self) -> Spread:
        return Spread.of([u / f for u, f in zip(self.unfused, self.fused, strict=True)])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speed_up": asdict(self.speed_up)}


def race(unfused: PreTrainedModel, fused: PreTrainedModel, tokens: torch.Tensor, rounds: int) -> list[Race]:
    """Time training steps and forward passes; the two models take turns.

    A slow machine (a CPU without bfloat16 instructions, say) gets fewer rounds.
    """
    dtype = str(unfused.dtype).removeprefix("torch.")
    kinds = {
        TRAINING: (_training(unfused, tokens), _training(fused, tokens)),
        FORWARD: (_forward(unfused, tokens), _forward(fused, tokens)),
    }
    races = {name: Race(name, dtype, tokens.numel()) for name in kinds}
    enough = time.monotonic() + ENOUGH_SECONDS
    for number in progress(range(-WARM_UP, rounds), f"taking turns, {dtype}"):
        if number >= ENOUGH_ROUNDS and time.monotonic() > enough:
            break
        for name, (run_unfused, run_fused) in kinds.items():
            turns = [(run_unfused, races[name].unfused), (run_fused, races[name].fused)]
            # The order alternates, too, because the second run finds the caches as the first run left them.
            for run, seconds in turns if number % 2 else reversed(turns):
                start = time.perf_counter()
                run()
                if number >= 0:
                    seconds.append(time.perf_counter() - start)
    return list(races.values())


def _training(model: PreTrainedModel, tokens: torch.Tensor) -> Callable[[], object]:
    adamw = optimizer(model)
    return lambda: step(model, adamw, tokens)


def _forward(model: PreTrainedModel, tokens: torch.Tensor) -> Callable[[], object]:
    return lambda: logits(model, tokens)
