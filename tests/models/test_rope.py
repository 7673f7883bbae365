"""Whole models of transformers, built small from their configs: with RoPE fused, they compute what they did before."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from support.tiny import BASE
from transformers import AutoConfig, AutoModel

from fuseplug import KernelManager

SMALL = BASE | {"hidden_size": 64, "head_dim": 16}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **{name: value for name, value in SMALL.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GPTJ = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}
GEMMA3N = {
    **SMALL,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0, 0.0],
    "layer_types": ["sliding_attention", "full_attention"],
}
LATENT_VARIANT = "mla" if transformers.__version__ >= "5" else "mla-full-table"

# model type, its config, and the variants that its rotary functions must be found to have
MODELS = [
    ("llama", SMALL, {"half"}),
    ("qwen2", SMALL, {"half"}),
    ("qwen3", SMALL, {"half"}),
    ("gemma", SMALL, {"half"}),
    ("gemma3_text", SMALL, {"half"}),
    ("gemma3n_text", GEMMA3N, {"half"}),
    ("phi3", SMALL, {"half-partial"}),
    ("glm4", SMALL, {"interleaved-first-half-partial"}),
    ("cohere", SMALL, {"interleaved-wide"}),
    ("olmo2", SMALL, {"half-promoting"}),
    ("deepseek_v3", LATENT | {"rope_interleave": True}, {"half", LATENT_VARIANT}),
    ("deepseek_v3", LATENT | {"rope_interleave": False}, {"half", LATENT_VARIANT}),
    ("gpt_oss", SMALL | MOE, {"half-size"}),
    ("gptj", GPTJ, {"interleaved-repeated"}),
    ("nanochat", SMALL, {"half-negated"}),
    ("helium", SMALL, {"interleaved-first-half"}),
    ("ernie4_5", SMALL, {"interleaved-first-half-wide"}),
]


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": "inductor_fused_rope"})


def build(model_type, config):
    torch.manual_seed(0)
    try:
        return AutoModel.from_config(AutoConfig.for_model(model_type, **config))
    except (ValueError, KeyError):
        pytest.skip(f"this version of transformers has no {model_type}")


def step(model):
    """One forward and backward: the outputs and every gradient, by name."""
    model.zero_grad()
    output = model(input_ids=torch.arange(24).view(2, 12) % 60 + 1).last_hidden_state
    output.square().mean().backward()
    return {"output": output.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def rotary_globals():
    """Every rotary function of every modeling file that is loaded, by where it is."""
    return {
        (name, function): id(getattr(module, function))
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and ".modeling_" in name
        for function in vars(module)
        if "rotary_" in function and function.startswith("apply")
    }


@pytest.mark.parametrize(
    ("model_type", "config", "variants"), MODELS, ids=[f"{row[0]}-{number}" for number, row in enumerate(MODELS)]
)
def test_a_model_is_fused_computes_the_same_and_comes_back(manager, model_type, config, variants):
    model = build(model_type, config).eval()
    before, functions = step(model), rotary_globals()

    applied = manager.apply_all(model, verify=False)

    assert {entry.variant for entry in applied.report.fused} == variants, applied.report
    assert not [entry for entry in applied.report.entries if not entry.fused], applied.report
    assert rotary_globals() == functions
    fused = step(model)
    assert fused.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-3, atol=1e-5 + 1e-4 * value.abs().max().item(), msg=name)
    with torch.no_grad():
        torch.testing.assert_close(step_output(model), before["output"], rtol=1e-3, atol=1e-4)
    applied.undo()
    assert rotary_globals() == functions
    after = step(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def step_output(model):
    return model(input_ids=torch.arange(24).view(2, 12) % 60 + 1).last_hidden_state


def test_the_rotation_is_really_that_of_the_kernel(manager, monkeypatch):
    from fuseplug_rope.backends import inductor

    calls = []
    monkeypatch.setattr(inductor.reference, "check", lambda *_: calls.append(1) or inductor.reference.VARIANTS["half"])
    model = build(*MODELS[0][:2])
    step(model)
    assert not calls
    with manager.apply_all(model, verify=False):
        calls.clear()
        step(model)
    assert len(calls) == 2


def test_another_model_of_the_same_class_is_untouched(manager):
    teacher, student = build(*MODELS[0][:2]), build(*MODELS[0][:2])
    before, functions = step(teacher), rotary_globals()
    with manager.apply_all(student, verify=False):
        assert manager.applied_to(teacher) is None
        assert rotary_globals() == functions
        during = step(teacher)
    assert rotary_globals() == functions
    assert all(torch.equal(during[name], value) for name, value in before.items())


def test_a_large_model_is_checked_with_the_compiled_program_and_runs_it(manager):
    model = build("llama", SMALL | {"num_hidden_layers": 1}).bfloat16()
    exact = build("llama", SMALL | {"num_hidden_layers": 1}).double()
    exact.load_state_dict(model.state_dict())
    tokens = torch.arange(4 * 1024).view(4, 1024) % 60 + 1
    with torch.no_grad():
        truth, eager = (m(input_ids=tokens).last_hidden_state for m in (exact, model))
        with manager.apply_all(model) as applied:
            assert [entry.check for entry in applied.report.fused] == ["passed"]
            fused = model(input_ids=tokens).last_hidden_state
    assert (fused - truth).abs().mean() <= 1.1 * (eager - truth).abs().mean()


def test_every_layer_of_a_deep_model_is_fused(manager):
    report = manager.plan(build("llama", SMALL | {"num_hidden_layers": 24}), verify=False).report
    assert sum(len(entry.paths) for entry in report.fused) == 24
