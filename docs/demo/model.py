"""A small Qwen3-MoE that reads and writes bytes."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

# Qwen3-30B-A3B at an eighth of its width and a twelfth of its depth, with 16 experts instead of 128. One layer is
# dense, so that all four ops occur.
CONFIG = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 4,
    "mlp_only_layers": [0],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def build(seed: int, dtype: torch.dtype = torch.float32) -> Qwen3MoeForCausalLM:
    """Return a new model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).to(dtype)


@torch.no_grad()
def logits(model: Qwen3MoeForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens).logits


@torch.no_grad()
def write(model: Qwen3MoeForCausalLM, prompt: str, *, length: int, seed: int) -> str:
    """Let the model continue *prompt* at a low temperature."""
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
