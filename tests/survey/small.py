"""Any config of transformers made small: what its numbers are by their names, and a table of what is particular."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD, _LAYERS = 64, 96, 4, 2, 16, 2

_RULES: tuple[tuple[str, int], ...] = (
    (r".*(vocab_size|vocabulary_size|codebook_size|num_embeddings|n_vocab)(_.*)?", 256),
    (r".*(q_lora_rank)", 24),
    (r".*(kv_lora_rank)", 32),
    (r".*(qk_rope_head_dim|qk_nope_head_dim|v_head_dim|index_head_dim)", _HEAD),
    (r".*(num_key_value_heads|num_kv_heads|n_kv_heads|num_key_value_groups|n_head_kv)", _KV_HEADS),
    (r".*(head_dim|d_kv|attention_head_size|d_head|head_size|attention_key_size|kv_channels)", _HEAD),
    (r".*(num_attention_heads|n_heads?|num_heads?|attention_heads|num_query_heads|mamba_n_heads)", _HEADS),
    (r".*(num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_selected_experts|moe_top_k|n_experts_per_token)", 2),
    (r".*(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|ffn_num_experts)", 4),
    (r".*(n_group|topk_group)", 1),
    (r".*(n_shared_experts|num_shared_experts|num_shared_expert|first_k_dense_replace|moe_num_shared_experts)", 1),
    (r".*(moe_intermediate_size|expert_intermediate_size|shared_expert_intermediate_size|expert_dim)", 32),
    (
        r".*(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|n_inner|feed_forward_size|dim_ff|mlp_dim|feedforward_dim)(_.*)?",
        _INNER,
    ),
    (r".*(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|encoder_width|emb_dim|feature_size)", _HIDDEN),
    (r".*(projection_dim|proj_dim|output_dim)", _HIDDEN),
    (
        r".*(num_hidden_layers|n_layers?|num_layers|depth|encoder_layers|decoder_layers|num_blocks|num_.*_layers)",
        _LAYERS,
    ),
    (r".*(max_position_embeddings|n_positions|max_sequence_length|max_seq_len|n_ctx)", 128),
    (r".*(image_size|img_size|input_size)", 32),
    (r".*(patch_size)", 8),
)
_SIZES = tuple((re.compile(pattern), value) for pattern, value in _RULES)


def small(config_class: type[PretrainedConfig], overrides: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """An instance of *config_class* with few layers, narrow, and with all kinds of layers that it has by default."""
    return config_class(**_arguments(config_class, overrides or {}))


def _arguments(config_class: type[PretrainedConfig], overrides: Mapping[str, Any]) -> dict[str, Any]:
    default = config_class()
    tokens = iter(range(3, 200))
    found: dict[str, Any] = {}
    for name in _fields(config_class):
        value = vars(default).get(name)
        if isinstance(value, PretrainedConfig):
            inner = dict(overrides.get(name, {}))
            found[name] = {"model_type": value.model_type} | _arguments(type(value), inner)
        elif type(value) is int:
            changed = number(name, value, tokens)
            if changed != value:
                found[name] = changed
    found |= _kinds_of_layers(default, found)
    return found | {
        name: value for name, value in overrides.items() if not isinstance(value, Mapping) or name not in found
    }


def _fields(config_class: type[PretrainedConfig]) -> Iterator[str]:
    if dataclasses.is_dataclass(config_class):
        yield from (field.name for field in dataclasses.fields(config_class) if field.init)
    else:
        yield from (
            name for name in inspect.signature(config_class.__init__).parameters if name not in ("self", "kwargs")
        )


def number(name: str, value: int, tokens: Iterator[int]) -> int:
    """What becomes of a number *value* that a config has under *name*; *tokens* are ids for special ones."""
    if re.fullmatch(r".*token_(id|index)|.*_token", name):
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return value if value < 0 else special.get(name) if name in special else next(tokens)
    for pattern, small_value in _SIZES:
        if pattern.fullmatch(name):
            return min(value, small_value) if value > 0 else value
    return value


def _kinds_of_layers(default: PretrainedConfig, found: Mapping[str, Any]) -> dict[str, Any]:
    """As many layers as it takes to have every kind there is, at least two."""
    kinds = getattr(default, "layer_types", None)
    if not isinstance(kinds, list) or "num_hidden_layers" not in found:
        return {}
    if "layer_types" not in _fields(type(default)):
        return {}
    every = list(dict.fromkeys(kinds))
    layers = every if len(every) > 1 else every * 2
    return {"layer_types": layers, "num_hidden_layers": len(layers)}
