"""RoPE in models of transformers on an NPU: recognised and checked there, right, and on no other model."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.thorough import quick_if
from support.tiny import BASE, TINY, exists, step

from fuseplug import KernelManager
from fuseplug_rope.kernels import NpuRoPEKernel

GPTJ = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}
LATENT = {"mla" if transformers.__version__ >= "5" else "mla-full-table", "half"}

# model type, its config, and the variants that its rotary functions have
MODELS = {
    "llama": (BASE, {"half"}),
    "qwen3": (TINY["qwen3"], {"half"}),
    "phi3": (BASE | {"partial_rotary_factor": 0.5}, {"half-partial"}),
    "gpt_neox": (BASE, {"half-partial"}),
    "olmo2": (BASE, {"half-promoting"}),
    "gpt_oss": (TINY["gpt_oss"], {"half-size"}),
    "nanochat": (BASE, {"half-negated"}),
    "cohere": (BASE, {"interleaved-wide"}),
    "helium": (BASE | {"head_dim": 16}, {"interleaved-first-half"}),
    "glm4": (TINY["glm4"], {"interleaved-first-half-partial"}),
    "ernie4_5": (TINY["qwen3"], {"interleaved-first-half-wide"}),
    "gptj": (GPTJ, {"interleaved-repeated"}),
    "deepseek_v3": (TINY["deepseek_v3"], LATENT),
    "qwen2_5_vl": (TINY["qwen2_5_vl"], {"half", "half-vision"}),
}


@pytest.fixture
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": "npu_fused_rope"})


def build(model_type):
    if not exists(model_type):
        pytest.skip("not in this version of transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type][0])
    auto = transformers.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        auto = transformers.AutoModelForImageTextToText
    return auto.from_config(config).eval()


@pytest.mark.parametrize("model_type", quick_if(MODELS, {"phi3", "gpt_oss", "cohere", "deepseek_v3", "qwen2_5_vl"}))
def test_a_model_is_fused_and_learns_what_it_did_on_the_cpu(host_npu, manager, model_type):
    model, teacher = build(model_type), build(model_type).to("npu")
    expected = step(model)
    model.to("npu")
    applied = manager.apply_all(model)
    assert {entry.variant for entry in applied.report.fused} == MODELS[model_type][1], applied.report
    assert {entry.check for entry in applied.report.entries} == {"passed"}, applied.report

    host_npu.calls.clear()
    found = step(model)
    assert host_npu.calls["npu_rotary_mul"] >= 2 * len(applied.report.fused)

    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5 + 1e-4 * value.abs().max().item(), msg=name)
    host_npu.calls.clear()
    step(teacher)
    assert not host_npu.calls["npu_rotary_mul"]
    applied.undo()
    step(model)
    assert not host_npu.calls["npu_rotary_mul"]


def test_what_is_lacking_is_said(monkeypatch):
    assert NpuRoPEKernel().lacks("npu") is None
    monkeypatch.setattr(NpuRoPEKernel, "ops", ("npu_rotary_mul", "npu_nothing"))
    assert "has no npu_nothing" in NpuRoPEKernel().lacks("npu")
