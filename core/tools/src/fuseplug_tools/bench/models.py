"""The model to measure: from a short name or whatever ``fuseplug plan`` takes, with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fuseplug.cli.from_config import config_of, config_of_type, with_random_weights
from fuseplug.errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch import nn

_QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960}
SHORT_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "qwen3",
        _QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        _QWEN3
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
    ),
    "llama-3-8b": (
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
    ),
}
"""Shapes that many models have: the model type, and the values that differ from its config's defaults."""


def build_random(
    name: str, *, layers: int | None, dtype: torch.dtype | None, device: str, trust_remote_code: bool = False
) -> nn.Module:
    """Build the model that *name* stands for, with random weights that are always the same.

    Args:
        name: One of `SHORT_NAMES`, or as for ``fuseplug plan``.
        layers: How many of its layers to build; ``None`` for all.
        dtype: The dtype of its weights; ``None`` for that in its config.
        device: The device on which it is built.
        trust_remote_code: Whether Python code that comes with the model may be run.

    Raises:
        PlanError: If there is no such model, or it has fewer layers.
    """
    if name.lower() in SHORT_NAMES:
        config = config_of_type(*SHORT_NAMES[name.lower()])
    else:
        config = config_of(name, trust_remote_code=trust_remote_code)
    if dtype is not None:
        config.dtype = dtype
    if layers is not None:
        _cut(config, name, layers)
    model = with_random_weights(config, name, device=device, trust_remote_code=trust_remote_code)
    return model if dtype is None else model.to(dtype=dtype)


def layers_of(model: nn.Module) -> int | None:
    """The number of layers in the config of *model*; ``None`` if the config has none."""
    return getattr(_text_config(model.config), "num_hidden_layers", None)


def _cut(config: Any, name: str, layers: int) -> None:
    text = _text_config(config)
    present = getattr(text, "num_hidden_layers", None)
    if present is None:
        raise PlanError(f"{name} has no num_hidden_layers in its config: leave out --layers", name=name)
    if not 1 <= layers <= present:
        raise PlanError(f"{name} has {present} layers; expected --layers from 1 to {present}, got {layers}", name=name)
    text.num_hidden_layers = layers
    for attribute in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(text, attribute, None), list):
            setattr(text, attribute, getattr(text, attribute)[:layers])


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config
