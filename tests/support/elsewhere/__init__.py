"""Models as people write them outside transformers, each tiny and complete: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from . import encoder, gpt, llama, recipes, vision

REMOTE = Path(__file__).with_name("remote")
"""A repository with a modeling file of its own."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama.Transformer(llama.ModelArgs()),
    "llama-mixture": lambda: llama.Transformer(llama.ModelArgs(num_experts=4)),
    "gpt": gpt.GPT,
    "encoder": encoder.Encoder,
    "recipes": recipes.decoder,
    "vision": vision.Classifier,
}
