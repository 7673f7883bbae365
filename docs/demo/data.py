"""The text as bytes, and the same batches for every run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

TEXT = Path(__file__).parent / "text" / "tom-sawyer.txt"
TITLE = "The Adventures of Tom Sawyer (Mark Twain, 1876)"
HELD_OUT = 0.1


@dataclass(frozen=True)
class Text:
    """One book, with its last tenth held out."""

    training: torch.Tensor
    held_out: torch.Tensor


def load() -> Text:
    tokens = torch.tensor(list(TEXT.read_bytes()))
    cut = int(len(tokens) * (1 - HELD_OUT))
    return Text(training=tokens[:cut], held_out=tokens[cut:])


def batches(tokens: torch.Tensor, count: int, *, batch: int, length: int, seed: int) -> list[torch.Tensor]:
    """Return *count* batches of random windows, as a list, so that two runs see the same ones."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - length, (count, batch, 1), generator=generator)
    return list(tokens[starts + torch.arange(length)])
