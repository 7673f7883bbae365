"""Models of transformers built small from their configs, and one step of each: logits and all gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

# One width for each purpose throughout, and one eps, so that programs compiled for one model serve all.
BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 16}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
EVERY_EXPERT = {"num_experts_per_tok": 4, "topk_group": 2}
"""For half precision, where a rounding may choose another expert, unfused as well as fused."""

LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "in_channels": 3,
}
SECTIONS = {"type": "default", "rope_type": "default", "mrope_section": [4, 2, 2]}

TINY: dict[str, Mapping[str, Any]] = {
    "llama": BASE,
    "qwen2": BASE,
    "qwen3": BASE | HEAD,
    "qwen3_moe": BASE | HEAD | EXPERTS | {"norm_topk_prob": True},
    "mixtral": BASE | EXPERTS,
    "gemma": BASE | HEAD,
    "gemma3_text": BASE | HEAD | {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "phi3": BASE,
    "glm4": BASE | HEAD,
    "deepseek_v3": BASE | EXPERTS | LATENT,
    "gpt_oss": BASE | HEAD | EXPERTS | {"sliding_window": 8},
    "cohere": BASE,
    "olmo2": BASE | {"num_key_value_heads": 4},
    "nanochat": BASE,
    "qwen2_5_vl": {
        "text_config": BASE | {"rope_scaling": SECTIONS, "rope_parameters": SECTIONS | {"rope_theta": 1e4}},
        "vision_config": VISION,
        "image_token_id": 60,
        "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63,
    },
}
"""The arguments of each config, by model type."""

_SIDE = 8
"""Patches along each side of the image, for a model that takes one."""


def exists(model_type: str) -> bool:
    """Whether the installed transformers has such a model."""
    return model_type in transformers.CONFIG_MAPPING


def build(model_type: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A model in eval mode, always with the same weights; in half precision its tokens go to every expert.

    Args:
        model_type: A key of `TINY`, or another type, with everything that its config must say among *options*.
        dtype: The dtype of its weights.
        options: Other arguments of its config.
    """
    torch.manual_seed(0)
    arguments = {**TINY.get(model_type, {}), **options}
    if dtype is not torch.float32:
        arguments = {**arguments, **{name: value for name, value in EVERY_EXPERT.items() if name in arguments}}
    config = transformers.AutoConfig.for_model(model_type, **arguments)
    auto = transformers.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # A norm's weight of exactly one, or a bias of exactly zero, would hide what is done with it.
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def inputs(model: nn.Module) -> dict[str, Tensor]:
    """Two sequences of tokens; for a model that takes images, one sequence with an image in it."""
    tokens = torch.arange(24).view(2, 12) * 7 % 57 + 3
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        return {"input_ids": tokens}
    merged = _SIDE**2 // vision.spatial_merge_size**2
    seen = torch.full((1, merged), model.config.image_token_id)
    start = torch.full((1, 1), model.config.vision_start_token_id)
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": torch.cat((tokens[:1], start, seen, tokens[1:]), dim=1),
        "pixel_values": torch.randn(_SIDE**2, values, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, _SIDE, _SIDE]]),
    }


def step(model: nn.Module, **others: Tensor) -> dict[str, Tensor]:
    """One forward and backward: the logits, and the gradient of each parameter that has one, by name, on the CPU.

    Args:
        model: The model.
        **others: Inputs beside `inputs`, or in their place.
    """
    dtype, device = (first := next(model.parameters())).dtype, first.device
    given = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in (inputs(model) | others).items()
    }
    model.zero_grad(set_to_none=True)
    logits = model(**{name: value.to(device) for name, value in given.items()}, use_cache=False).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits.backward((upstream / logits.numel() ** 0.5).to(device))
    gradients = {name: p.grad.to("cpu", copy=True) for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().cpu()} | gradients
