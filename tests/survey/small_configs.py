"""Makes any config of transformers small: numbers by the names of their fields, and a table of exceptions."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from .overrides import OVERRIDES

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD, _LAYERS = 64, 96, 4, 2, 16, 2

_RULES: tuple[tuple[str, int], ...] = (
    (r".*(vocab_size|vocabulary_size|codebook_size|num_embeddings|n_vocab)(_.*)?", 256),
    (r"mamba_n_heads", 8),
    (r".*(q_lora_rank)", 24),
    (r".*(kv_lora_rank)", 32),
    (r"qk_head_dim", 2 * _HEAD),
    (r"rotary_dim", _HEAD // 2),
    (r"num_queries", 4),
    (r".*(qk_rope_head_dim|qk_nope_head_dim|v_head_dim|index_head_dim)", _HEAD),
    (r".*(num_key_value_heads|num_kv_heads|n_kv_heads|num_key_value_groups|n_head_kv)", _KV_HEADS),
    (r".*(head_dim|d_kv|attention_head_size|d_head|head_size|attention_key_size|kv_channels)", _HEAD),
    (r".*(num_attention_heads|n_heads?|num_heads?|attention_heads|num_query_heads)", _HEADS),
    (r".*(num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_selected_experts|moe_top_k|n_experts_per_token)", 2),
    (r".*(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|ffn_num_experts)", 4),
    (r".*(n_group|topk_group)", 1),
    (r".*(n_shared_experts|num_shared_experts|num_shared_expert|first_k_dense_replace|moe_num_shared_experts)", 1),
    (r".*(moe_intermediate_size|expert_intermediate_size|shared_expert_intermediate_size|expert_dim)", 32),
    (
        r".*(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|n_inner|feed_forward_size|dim_ff|mlp_dim|feedforward_dim)(_.*)?",
        _INNER,
    ),
    (
        r".*(hidden_size(?:_global)?|d_model|n_embd|embed_dim|hidden_dim|embedding_size|encoder_width|emb_dim|feature_size)",
        _HIDDEN,
    ),
    (r".*(projection_dim|proj_dim|output_dim)", _HIDDEN),
    (
        r".*(num_hidden_layers|n_layers?|num_layers|depth|encoder_layers|decoder_layers|num_blocks|num_.*_layers)",
        _LAYERS,
    ),
    (r".*(max_position_embeddings|n_positions|max_sequence_length|max_seq_len|n_ctx)", 128),
    (r".*(image_size|img_size|input_size)", 32),
    (r".*(patch_size)", 8),
    (r".*(rope_feat_sizes)", 4),
)
_SIZES = tuple((re.compile(pattern), value) for pattern, value in _RULES)
_LEFT_OPEN = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "head_dim": _HEAD}
"""Numbers that a config may leave open although its model needs them."""

_GIVEN = {"use_swiglu_ffn": True, "use_gated_mlp": True, "mlp_only_layers": [0], "use_mamba_kernels": False}
"""Values that differ from a config's defaults, because some checkpoints of its model type have them."""

_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "n_layer", "n_layers")
_LAYER_NUMBERS = re.compile(r".*(indexes|indices|idxs|idx|layer_ids|_layers|feature_layer)")
_MOST_KINDS = 4
"""A list with more distinct entries does not tell the kinds of the layers."""


def small_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """A narrow instance of *config_class* with few layers, but with every kind of layer that it has by default."""
    return config_class(**_arguments(config_class, {}))


def _arguments(config_class: type[PretrainedConfig], overrides: Mapping[str, Any]) -> dict[str, Any]:
    default = config_class()
    overrides = {**OVERRIDES.get(default.model_type, {}), **overrides}
    tokens = iter(range(3, 200))
    fields = {name: vars(default).get(default.attribute_map.get(name, name)) for name in _fields(config_class)}
    parts = {name for name, value in fields.items() if isinstance(value, PretrainedConfig)}
    found: dict[str, Any] = {name: _part(fields[name], overrides.get(name, {})) for name in parts}
    for name, value in fields.items():
        if type(value) is int:
            found[name] = number(name, value, tokens)
        elif isinstance(value, list | tuple) and len(set(map(repr, value))) == 1 and type(value[0]) is int:
            found[name] = type(value)([number(name, value[0], tokens)] * len(value))
        elif value is None and name in _LEFT_OPEN:
            found[name] = _LEFT_OPEN[name]
        elif name in _GIVEN:
            found[name] = _GIVEN[name]
    if "kv_lora_rank" in fields and "num_attention_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    found |= _layers(fields, found)
    found |= _sections(default, fields)
    found = {name: value for name, value in found.items() if name in parts or value != fields[name]}
    for name, value in overrides.items():
        if name not in parts:
            within = fields.get(name)
            found[name] = {**within, **value} if isinstance(within, Mapping) and isinstance(value, Mapping) else value
    return found


def _part(default: PretrainedConfig, overrides: Mapping[str, Any]) -> dict[str, Any] | PretrainedConfig:
    """The arguments of a config within a config, or a small config of the model type that *overrides* name."""
    if "model_type" in overrides:
        return small_config(CONFIG_MAPPING[overrides["model_type"]])
    return {"model_type": default.model_type} | _arguments(type(default), overrides)


def _fields(config_class: type[PretrainedConfig]) -> Iterator[str]:
    if dataclasses.is_dataclass(config_class):
        yield from (field.name for field in dataclasses.fields(config_class) if field.init)
    else:
        yield from (
            name for name in inspect.signature(config_class.__init__).parameters if name not in ("self", "kwargs")
        )


def number(name: str, value: int, tokens: Iterator[int]) -> int | None:
    """The small number for *value*, which a config has under *name*; *tokens* supplies ids for special tokens."""
    if re.fullmatch(r".*token_(id|index)|.*_token", name):
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return value if value < 0 else special[name] if name in special else next(tokens)
    for pattern, small_value in _SIZES:
        if pattern.fullmatch(name):
            return min(value, small_value) if value > 0 else value
    return value


def _layers(fields: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Enough layers for one of every kind, at least two, and the lists about layers, shortened to match."""
    depth = next((name for name in _DEPTHS if found.get(name)), None)
    if depth is None:
        return {}
    many, few = fields[depth], found[depth]
    lists = {
        name: found.get(name, value) for name, value in fields.items() if isinstance(value, list | tuple) and value
    }
    each = {name: value for name, value in lists.items() if len(value) == many > few}
    kept = _one_of_each([value for value in each.values() if len(set(map(repr, value))) <= _MOST_KINDS], many, few)
    if each:
        few = len(kept)
    sized: dict[str, Any] = {name: [value[i] for i in kept] for name, value in each.items()}
    for name, value in lists.items():
        if name not in each and _LAYER_NUMBERS.fullmatch(name) and all(type(i) is int for i in value):
            sized[name] = list(dict.fromkeys(i * few // many if i >= 0 else max(i, -few) for i in value))
    if set(sized.get("mlp_layer_types", ())) == {"sparse"}:
        sized["mlp_layer_types"][0] = "dense"
    return sized | {depth: few}


def _one_of_each(columns: Sequence[Sequence[Any]], many: int, few: int) -> list[int]:
    """The indices of the first layer of each kind, and of the first other layers until there are *few*."""
    kinds = [repr(row) for row in zip(*columns, strict=True)] or [""] * many
    first = list(dict.fromkeys(kinds.index(kind) for kind in kinds))
    return sorted([*first, *(i for i in range(many) if i not in first)][: max(few, len(first))])


def _sections(default: PretrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of multimodal rotations, scaled to the sum that the narrower head needs."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    sections = rope.get("mrope_section") if isinstance(rope, Mapping) else None
    if not sections:
        return {}
    wide = fields.get("head_dim") or default.hidden_size // default.num_attention_heads
    total = sum(sections) * _HEAD // wide
    scaled = [section * total // sum(sections) for section in sections]
    for i in range(total - sum(scaled)):
        scaled[i] += 1
    return {name: {**rope, "mrope_section": scaled}}
