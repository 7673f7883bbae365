"""Whole mixture-of-experts models of transformers: fused, they compute what they computed before."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from support.tiny import BASE
from transformers import AutoConfig, AutoModel

from fuseplug import KernelManager
from fuseplug_moe.kernels import InductorMoEKernel

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
# model type, its config, the variants in transformers 5 and 4.57; None where its blocks are left alone
MODELS = [
    ("mixtral", {}, "silu", "silu renormalised"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 16}, "silu", "silu norm_topk_prob gated shared"),
    ("qwen3_moe", HEAD, "silu", "silu norm_topk_prob"),
    ("qwen3_next", NEXT, "silu", "silu norm_topk_prob gated shared"),
    ("olmoe", {}, "silu", "silu norm_topk_prob"),
    ("deepseek_v2", MLA, "silu", "silu"),
    ("deepseek_v3", MLA, "silu", "silu"),
    ("glm4_moe", MLA | HEAD, "silu", "silu"),
    ("dots1", MLA | HEAD, "silu", "silu"),
    ("gpt_oss", HEAD, *["sigmoid-linear interleaved transposed biased"] * 2),
    ("minimax", HEAD | {"layer_types": ["full_attention"] * 2}, "silu", "silu renormalised"),
    ("granitemoe", {}, "silu", None),
    ("phimoe", {}, "silu", None),
    ("llama4_text", {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 32} | HEAD, None, None),
]
ROWS = [(name, config, five if FIVE else four) for name, config, five, four in MODELS]


@pytest.fixture(scope="module")
def manager():
    manager = KernelManager(environ={"FUSEPLUG_KERNELS": InductorMoEKernel.kernel_id})
    if not any(record.kernel for record in manager.kernels()):
        manager = KernelManager(environ={})  # it runs from its sources
        manager.register(InductorMoEKernel)
    return manager


def build(model_type, config):
    torch.manual_seed(0)
    try:
        made = AutoConfig.for_model(model_type, **SMALL | config)
    except ValueError:
        pytest.skip(f"this version of transformers has no {model_type}")
    model = AutoModel.from_config(made).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Routers that are far from undecided, for no rounding to choose another expert.
            parameter.normal_(0, 1.0 if parameter.shape[0] in (6, 8) and parameter.dim() == 2 else 0.2)
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(1)
    return model


def step(model):
    """One forward and backward: the outputs and every gradient, by name."""
    tokens = torch.arange(24).view(2, 12) % 60 + 1
    model.zero_grad()
    output = model(input_ids=tokens).last_hidden_state
    output.square().mean().backward()
    return {"output": output.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def entries(report):
    return [entry for entry in report.entries if entry.op == "moe"]


@pytest.mark.parametrize(("model_type", "config", "variant"), ROWS, ids=[row[0] for row in ROWS])
def test_a_model_computes_the_same_and_comes_back(manager, model_type, config, variant):
    model = build(model_type, config)
    before = step(model)

    applied = manager.apply_all(model)

    found = {entry.variant for entry in entries(applied.report) if entry.fused}
    assert found == ({variant} if variant else set()), applied.report
    assert all(entry.why_not for entry in entries(applied.report) if not entry.fused and not entry.covered_by)
    fused = step(model)
    assert fused.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-3, atol=1e-6 + 2e-5 * value.abs().max().item(), msg=name)
    applied.undo()
    after = step(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(("model_type", "config", "variant"), [ROWS[0], ROWS[9]], ids=["mixtral", "gpt_oss"])
def test_half_precision_differs_by_roundings_only(manager, model_type, config, variant):
    model = build(model_type, config).bfloat16()
    eager = step(model)["output"]
    exact = build(model_type, config)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    truth = step(exact)["output"]
    with manager.apply_all(model) as applied:
        assert {entry.variant for entry in entries(applied.report)} == {variant}
        fused = step(model)["output"]
    # Where a rounding decides between two experts, it does so for whole tokens: the middle of them is compared.
    error = [(each - truth).abs().amax(-1).median() for each in (fused, eager)]
    assert error[0] <= 1.5 * error[1]


@pytest.mark.skipif(not FIVE, reason="the implementation of experts is chosen since transformers 5")
class TestImplementations:
    @pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
    def test_each_is_found_to_be_the_same(self, manager, implementation):
        model = build("mixtral", {})
        model.set_experts_implementation(implementation)
        before = step(model)
        with manager.apply_all(model) as applied:
            assert {entry.variant for entry in entries(applied.report)} == {"silu"}
            fused = step(model)
        for name, value in before.items():
            torch.testing.assert_close(fused[name], value, rtol=1e-3, atol=1e-6 + 2e-5 * value.abs().max().item())

    def test_setting_one_after_applying_changes_nothing_and_undo_brings_it(self, manager):
        model = build("mixtral", {})
        applied = manager.apply_all(model)
        fused = step(model)["output"]
        model.set_experts_implementation("eager")
        assert torch.equal(step(model)["output"], fused)
        applied.undo()
        eager = build("mixtral", {})
        eager.set_experts_implementation("eager")
        assert torch.equal(step(model)["output"], step(eager)["output"])

    @pytest.mark.parametrize("parallel", [False, True])
    def test_an_expert_of_another_rank_adds_nothing(self, manager, parallel):
        experts = build("mixtral", {}).layers[0].mlp.experts
        experts._is_expert_parallel = parallel
        x, index = torch.randn(7, 32), torch.rand(7, 6).topk(2)[1]
        index[::2, 0] = 6
        weights = torch.rand(7, 2).masked_fill(index == 6, 0.0)
        eager = copy.deepcopy(experts)
        eager.config = copy.deepcopy(eager.config)
        eager.config._experts_implementation = "eager"
        manager.apply_all(experts)
        torch.testing.assert_close(experts(x, index, weights), eager(x, index, weights), rtol=1e-4, atol=1e-5)

    def test_it_compiles_to_one_graph_as_before(self, manager):
        experts = build("mixtral", {}).layers[0].mlp.experts
        arguments = torch.randn(7, 32), torch.rand(7, 6).topk(2)[1], torch.rand(7, 2)
        expected = experts(*arguments)
        manager.apply_all(experts)
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*arguments), expected, rtol=1e-4, atol=1e-5)


def test_adapters_of_peft_are_computed_whether_added_before_or_after(manager):
    peft = pytest.importorskip("peft")
    names = "gate_proj|up_proj|down_proj|q_proj"
    config = peft.LoraConfig(r=2, target_modules=rf".*\.({names})", init_lora_weights=False)
    model = build("qwen2_moe", {"shared_expert_intermediate_size": 16})
    manager.apply_all(model)
    torch.manual_seed(1)
    after = peft.get_peft_model(model, config)
    plain = build("qwen2_moe", {"shared_expert_intermediate_size": 16})
    torch.manual_seed(1)
    plain = peft.get_peft_model(plain, config)
    expected = step(plain)
    for name, value in step(after).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5 + 1e-4 * value.abs().max().item())
    report = manager.apply_all(plain).report
    fused = {entry.fused for entry in entries(report)}
    assert fused == ({True} if FIVE else {False}), report
