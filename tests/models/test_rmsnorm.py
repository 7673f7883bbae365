"""Whole models of transformers, built small from their configs: fused, they compute what they computed before."""

from __future__ import annotations

import pytest
import torch
from support.thorough import first_quick
from support.tiny import BASE as SMALL
from transformers import AutoConfig, AutoModel

from fuseplug import KernelManager

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
T5 = {
    "vocab_size": 64,
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
NEXT = {
    **SMALL,
    **MOE,
    "head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA2 = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 8,
}
# model type, its config, the variant that each class of norm must be found to have
MODELS = [
    ("llama", SMALL, {"LlamaRMSNorm": "llama"}),
    ("qwen3", SMALL | {"head_dim": 16}, {"Qwen3RMSNorm": "llama"}),
    ("gemma2", SMALL | {"head_dim": 16}, {"Gemma2RMSNorm": "gemma"}),
    ("olmo2", SMALL, {"Olmo2RMSNorm": "cast-last"}),
    ("t5", T5, {"T5LayerNorm": "t5"}),
    ("qwen3_moe", SMALL | MOE | {"head_dim": 16}, {"Qwen3MoeRMSNorm": "llama"}),
    ("gpt_oss", SMALL | MOE | {"head_dim": 16}, {"GptOssRMSNorm": "cast-last"}),
    ("qwen3_next", NEXT, {"Qwen3NextRMSNorm": "gemma", "Qwen3NextRMSNormGated": "gated-silu"}),
    ("mamba2", MAMBA2, {"Mamba2RMSNorm": "llama", "MambaRMSNormGated": "gate-first"}),
    ("helium", SMALL | {"head_dim": 16}, {"HeliumRMSNorm": "cast-last"}),
]


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={})


def build(model_type, config):
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # a norm's weight of exactly one or zero would hide what is done with it
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def step(model):
    """One forward and backward: the outputs and every gradient, by name."""
    tokens = torch.arange(24).view(2, 12) % 60 + 1
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    model.zero_grad()
    output = model(**inputs).last_hidden_state
    output.square().mean().backward()
    return {"output": output.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("model_type", "config", "variants"), first_quick(MODELS), ids=[row[0] for row in MODELS])
def test_a_model_is_fused_completely_computes_the_same_and_comes_back(manager, model_type, config, variants):
    model = build(model_type, config).eval()
    before = step(model)

    applied = manager.apply_all(model, include=["rmsnorm"])

    found = {entry.class_name: entry.variant for entry in applied.report.fused}
    assert found == variants, applied.report
    norms = [path for path, module in model.named_modules() if type(module).__name__ in variants]
    assert sorted(path for entry in applied.report.fused for path in entry.paths) == sorted(norms)
    fused = step(model)
    assert fused.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-3, atol=1e-5 + 1e-4 * value.abs().max().item(), msg=name)
    applied.undo()
    after = step(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_another_model_of_the_same_class_is_untouched(manager):
    teacher, student = build(*MODELS[0][:2]), build(*MODELS[0][:2])
    before = step(teacher)
    with manager.apply_all(student, include=["rmsnorm"]):
        assert manager.applied_to(teacher) is None
        during = step(teacher)
    assert all(torch.equal(during[name], value) for name, value in before.items())


def test_half_precision_differs_by_roundings_only(manager):
    model = build(*MODELS[1][:2]).eval().bfloat16()
    exact = build(*MODELS[1][:2]).eval().double()
    exact.load_state_dict(model.state_dict())
    truth, eager = step(exact)["output"], step(model)["output"]
    with manager.apply_all(model, include=["rmsnorm"]) as applied:
        assert len(applied.report.fused) == 9
        fused = step(model)["output"]
    assert (fused - truth).abs().max() <= 2 * (eager - truth).abs().max()
