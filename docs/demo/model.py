"""A small Qwen3 that reads and writes bytes."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

# Qwen3-0.6B at a quarter of its width and a seventh of its depth; the proportions, which decide what share of a step
# the norms take, are its own.
CONFIG = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def build(seed: int, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """Return a new model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**CONFIG)).to(dtype)


@torch.no_grad()
def logits(model: Qwen3ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens).logits


@torch.no_grad()
def write(model: Qwen3ForCausalLM, prompt: str, *, length: int, seed: int) -> str:
    """Let the model go on from *prompt*, at a low temperature."""
    torch.manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    written = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=length,
        do_sample=True,
        temperature=0.4,
        top_k=0,
    )
    return bytes(written[0].tolist()).decode("ascii", errors="replace")
