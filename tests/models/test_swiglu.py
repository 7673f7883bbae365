"""The gated MLPs of transformers are recognised, and compute the same with adapters and hooks of others."""

import importlib
import types

import pytest
import torch
import transformers
from support.managers import manager_of
from support.thorough import covering
from support.tiny import BASE as SMALL
from torch import nn
from transformers import AutoConfig, AutoModel

from fuseplug_swiglu.kernels import SwiGLUKernel

T5 = {"vocab_size": 64, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5 |= {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}

CONFIG = {
    **SMALL,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_bias": False,
    "d_model": 48,
    "d_ff": 64,
    "ffn_dim": 128,
    "dim_ff": 96,
    "dropout_rate": 0.1,
    "dense_act_fn": "gelu_new",
    "activation": "swish",
    "mlp_multipliers": [0.9, 0.3],
    "residual_dropout": 0.1,
    "activation_sparsity_pattern": [0.95, 0.0],
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "swiglu_limits_shared": [16.0, 0.0],
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "hidden_dropout_prob": 0.1,
    "rms_norm_eps": 1e-6,
    "add_bias_linear": False,
    "adapter_rank": 4,
    "num_mem_blocks": 1,
    "hybrid_layer_ids": [0],
    "mlp_dropout": 0.1,
    "dtype": torch.float32,
}
# model, class, arguments after the config, differences of the config, variant
TRAPS = [
    ("beam", "BeamMLP", {}, {}, "silu wide"),
    ("bitnet", "BitNetMLP", {}, {"hidden_act": "relu2"}, "relu2"),
    ("deepseek_v4", "DeepseekV4MLP", {}, {}, "silu clamp-before"),
    ("glm5_next", "Glm5NextTextMLP", {}, {}, "silu clamp-before"),
    ("step3p7", "Step3p7MLP", {"layer_idx": 0, "is_shared_expert": False}, {}, "silu clamp-after"),
    ("step3p7", "Step3p7MLP", {"layer_idx": 1, "is_shared_expert": False}, {}, "silu clamp-after"),
    ("falcon_h1", "FalconH1MLP", {}, {}, "silu scaled"),
    ("gemma3n", "Gemma3nTextMLP", {"layer_idx": 0}, {"intermediate_size": [64, 64]}, "gelu_tanh sparse"),
    ("gemma3n", "Gemma3nTextMLP", {"layer_idx": 1}, {"intermediate_size": [64, 64]}, "gelu_tanh sparse"),
    ("inkling", "InklingMLP", {}, {}, "silu"),
    ("seed_oss", "SeedOssMLP", {}, {}, "silu"),
    ("gte", "GteMLP", {}, {"hidden_act": "gelu"}, "gelu"),
    ("t5gemma", "T5GemmaMLP", {}, {}, "gelu_tanh"),
    ("longt5", "LongT5DenseGatedActDense", {}, {"dense_act_fn": "relu"}, "relu"),
    ("minimax_m3_vl", "MiniMaxM3VLDenseMLP", {}, {}, "swish clamp-before-offset gate-first"),
    ("phi4_multimodal", "Phi4MultimodalAudioMLP", {}, {}, "silu gate-second"),
    ("phi4_multimodal", "Phi4MultimodalMLP", {}, {}, "silu gate-first"),
    ("moonshine", "MoonshineDecoderMLP", {"hidden_act": "silu"}, {}, "silu gate-second"),
    ("moshi", "MoshiGatingMLP", {}, {}, "silu gate-first"),
    ("cpmant", "CpmAntDenseGatedACT", {}, {}, "gelu"),
    ("clvp", "ClvpGatedLinearUnit", {}, {"hidden_act": "gelu"}, "gelu gate-second"),
    ("lfm2", "Lfm2MLP", {}, {"block_auto_adjust_ff_dim": False}, "silu"),
    ("granitemoeshared", "GraniteMoeSharedMLP", {}, {}, "silu gate-first"),
    ("llama", "LlamaMLP", {}, {"hidden_act": "swish"}, "silu"),
    ("llama", "LlamaMLP", {}, {"hidden_act": "quick_gelu"}, "quick_gelu"),
    ("llama", "LlamaMLP", {}, {"hidden_act": "gelu_fast"}, "gelu_fast"),
    ("llama", "LlamaMLP", {}, {"hidden_act": "gelu_python"}, None),  # a method kept as an attribute is not read
    ("llama", "LlamaMLP", {}, {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True}, "gelu_tanh"),
    ("llama", "LlamaMLP", {}, {"hidden_act": "mish"}, None),
    ("llama", "LlamaMLP", {}, {"hidden_act": "gelu_10"}, None),
    ("nemotron", "NemotronMLP", {}, {"hidden_act": "relu2"}, None),
    ("arcee", "ArceeMLP", {}, {"hidden_act": "relu2"}, None),
    ("apertus", "ApertusMLP", {}, {"hidden_act": "xielu"}, None),
    ("zamba2", "Zamba2MLP", {"num_fwd_mem_blocks": 1, "block_id": 0}, {}, None),
    ("diffusion_gemma", "DiffusionGemmaSelfConditioning", {}, {}, None),
]

EXPLAINED = ("Zamba2", "DiffusionGemma")


class Referring(SwiGLUKernel):
    """Runs the reference, so that nothing is compiled, and nothing needs to be checked."""

    kernel_id = "reference_swiglu"
    function = "fuseplug_swiglu.reference:swiglu"


@pytest.fixture
def manager():
    return manager_of(Referring)


def build(model_type, config):
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(model_type, **config))


def step(model):
    """One forward and backward: the outputs and every gradient, by name."""
    tokens = torch.arange(24).view(2, 12) % 60 + 1
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    torch.manual_seed(0)
    model.zero_grad()
    output = model(**inputs).last_hidden_state
    output.square().mean().backward()
    return {"output": output.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def way(model, name, arguments, differs, variant):
    """What the first half must cover: reports with and without an explanation. tests/swiglu covers the variants."""
    return [name.startswith(EXPLAINED)]


@pytest.mark.parametrize(("model", "name", "arguments", "differs", "variant"), covering(TRAPS, by=way))
def test_what_looks_alike_is_told_apart(manager, model, name, arguments, differs, variant):
    try:
        cls = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this version of transformers has no {name}")
    config = types.SimpleNamespace(**CONFIG | differs)
    module = cls(config, **arguments)
    if differs == {"hidden_act": "gelu_python"} and transformers.__version__ < "5":
        variant = None  # there, the activation keeps a method as an attribute, and such a method is not read
    report = manager.plan(module, verify=False).report
    assert [entry.variant for entry in report.fused] == ([variant] if variant else []), report
    if name.startswith(EXPLAINED):
        assert [kind.kind for _, kind in report.entries[0].rejections] == ["unsupported"], "it says why"


def test_what_is_kept_in_float32_stays_so(manager):
    model = build("t5", T5).bfloat16().eval()
    for module in model.modules():
        if hasattr(module, "wo"):
            module.wo.float()
    before = step(model)
    with manager.apply_all(model, verify=False) as applied:
        assert len(applied.report.fused) == 4
        during = step(model)
    assert all(torch.equal(during[name], value) for name, value in before.items())


class TestPeft:
    @pytest.fixture(params=["before", "after"])
    def fused(self, request, manager):
        """A fused model with LoRA on its MLPs, added before or after it was fused, and its manager."""
        peft = pytest.importorskip("peft")
        model = build("llama", SMALL)
        if request.param == "after":
            manager.apply_all(model, verify=False)
        config = peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["gate_proj", "up_proj", "down_proj"])
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(model, config)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:  # initially zero, which would hide the adapter
                nn.init.normal_(parameter)
        if request.param == "before":
            manager.apply_all(model, verify=False)
        return model, manager

    def test_lora_is_called_and_trained(self, fused):
        model, manager = fused
        during = step(model)
        assert any("lora_A" in name for name in during)
        assert len(manager.applied_to(model).report.fused) == 2
        manager.undo(model)
        before = step(model)
        assert before.keys() == during.keys()
        assert all(torch.equal(before[name], during[name]) for name in before), "LoRA's dropout draws the same numbers"


def test_hooks_of_accelerate_move_what_they_must(manager):
    hooks = pytest.importorskip("accelerate.hooks")
    model = build("llama", SMALL).eval()
    before = step(model)["output"]
    manager.apply_all(model, verify=False)
    calls = []

    class Counting(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return args, kwargs

    for module in model.layers[0].mlp.children():
        hooks.add_hook_to_module(module, Counting())
    hooks.add_hook_to_module(model.layers[1].mlp, Counting())
    assert torch.equal(step(model)["output"], before)
    # The hook on an activation brings back the original of that MLP. A hook on an MLP leaves it fused.
    hooked = ["Linear", "SiLUActivation", "Linear", "Linear"]
    assert [type(module).__name__ for module in calls] == [*hooked, "LlamaMLP"]
    manager.undo(model)
    assert torch.equal(step(model)["output"], before)
