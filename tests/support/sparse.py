"""Small mixture-of-experts models of transformers, and the variants that are to be found in them."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel

from support.tiny import BASE

FIVE = int(transformers.__version__.split(".")[0]) >= 5
SMALL = BASE | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
HEAD = {"head_dim": 8}
MLA = {
    "n_routed_experts": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
NEXT = {
    **HEAD,
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "decoder_sparse_step": 1,
}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
SEEING = {"rope_scaling": SECTIONS, "rope_parameters": SECTIONS, "decoder_sparse_step": 1, "mlp_only_layers": []}
# Model type, its config, and the variants in transformers 5 and 4.57; None if its blocks are left alone.
MODELS = [
    ("mixtral", {}, "silu", "silu renormalised"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 16}, "silu", "silu norm_topk_prob gated shared"),
    ("qwen3_moe", HEAD, "silu", "silu norm_topk_prob"),
    ("qwen3_vl_moe_text", HEAD | SEEING, "silu", "silu transposed"),
    ("qwen3_next", NEXT, "silu", "silu norm_topk_prob gated shared"),
    ("olmoe", {}, "silu", "silu norm_topk_prob"),
    ("deepseek_v2", MLA, "silu", "silu"),
    ("deepseek_v3", MLA, "silu", "silu"),
    ("glm4_moe", MLA | HEAD, "silu", "silu"),
    ("dots1", MLA | HEAD, "silu", "silu"),
    ("gpt_oss", HEAD, *["swish-clamp-before-offset interleaved transposed biased"] * 2),
    ("minimax", HEAD | {"layer_types": ["full_attention"] * 2}, "silu", "silu renormalised"),
    ("granitemoe", {}, "silu", "silu sorted"),
    ("phimoe", {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}, "silu", None),
    (
        "llama4_text",
        {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 32} | HEAD,
        *["silu input-scaled shared"] * 2,
    ),
]
ROWS = [(name, config, five if FIVE else four) for name, config, five, four in MODELS]


def build(model_type, config):
    torch.manual_seed(0)
    try:
        made = AutoConfig.for_model(model_type, **SMALL | config)
    except ValueError:
        pytest.skip(f"this version of transformers has no {model_type}")
    model = AutoModel.from_config(made).train()  # in eval mode, some originals compute calls with gradients
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The routers decide clearly, so that no rounding chooses another expert.
            parameter.normal_(0, 1.0 if parameter.shape[0] in (6, 8) and parameter.dim() == 2 else 0.2)
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(1)
    return model


def step(model, autocast=None):
    """One forward, under autocast to the dtype *autocast* if given, and backward: output and gradients, by name."""
    tokens = (torch.arange(24).view(2, 12) % 60 + 1).to(model.device)
    model.zero_grad()
    with torch.autocast(model.device.type, autocast, enabled=autocast is not None):
        output = model(input_ids=tokens).last_hidden_state
    output.float().square().mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().cpu().clone() for name, value in ({"output": output} | gradients).items()}


def entries(report):
    return [entry for entry in report.entries if entry.op == "moe"]
