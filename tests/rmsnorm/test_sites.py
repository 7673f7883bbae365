"""Every form of RMSNorm in transformers is recognised, and its variant found by what it computes."""

import importlib

import pytest
import torch
from torch import nn

from fuseplug.contract import Rejection, Site
from fuseplug_rmsnorm import reference, specimens
from fuseplug_rmsnorm.recognise.adapters import NormAdapter
from fuseplug_rmsnorm.recognise.structure import match

WIDTH = 48

TRANSFORMERS = [
    ("llama", "LlamaRMSNorm", {"hidden_size": WIDTH}, "llama"),
    ("qwen3", "Qwen3RMSNorm", {"hidden_size": WIDTH}, "llama"),
    ("llama4", "Llama4TextRMSNorm", {"hidden_size": WIDTH}, "llama"),
    ("llama4", "Llama4TextL2Norm", {}, "llama"),
    ("falcon_mamba", "FalconMambaWeightlessRMSNorm", {"hidden_size": WIDTH}, "llama"),
    ("gpt_oss", "GptOssRMSNorm", {"hidden_size": WIDTH}, "cast-last"),
    ("olmo2", "Olmo2RMSNorm", {"hidden_size": WIDTH}, "cast-last"),
    ("helium", "HeliumRMSNorm", {"hidden_size": WIDTH}, "cast-last"),
    ("moshi", "MoshiRMSNorm", {"dim": WIDTH}, "cast-last"),
    ("gemma3n", "Gemma3nRMSNorm", {"dim": WIDTH}, "cast-last-pow"),
    ("gemma3n", "Gemma3nRMSNorm", {"dim": WIDTH, "with_scale": False}, "cast-last-pow"),
    ("gemma4", "Gemma4RMSNorm", {"dim": WIDTH}, "cast-last-pow"),
    ("gemma", "GemmaRMSNorm", {"dim": WIDTH}, "gemma"),
    ("gemma2", "Gemma2RMSNorm", {"dim": WIDTH}, "gemma"),
    ("qwen3_next", "Qwen3NextRMSNorm", {"dim": WIDTH}, "gemma"),
    ("qwen4_exp", "Qwen4ExpTextRMSNorm", {"dim": WIDTH, "group_size": 16}, "gemma"),
    ("qwen4_exp", "Qwen4ExpTextRMSNorm", {"dim": WIDTH}, "gemma"),
    ("muse_spark", "MuseSparkTextCenteredRMSNorm", {"dim": WIDTH}, "gemma-own-offset"),
    ("muse_spark", "MuseSparkTextInputScaledRMSNorm", {"dim": WIDTH}, "gemma-input-scaled"),
    ("t5", "T5LayerNorm", {"hidden_size": WIDTH}, "t5"),
    ("idefics", "IdeficsRMSNorm", {"hidden_size": WIDTH}, "t5"),
    ("deepseek_v4", "DeepseekV4UnweightedRMSNorm", {}, "rounded-root"),
    ("imagegpt", "ImageGPTLayerNorm", {"hidden_size": WIDTH}, "no-upcast-div"),
    ("gradium_phonon_tts", "GradiumPhononTTSTimestepNorm", {"hidden_size": WIDTH}, "no-upcast-weight-first"),
    ("xlstm", "xLSTMRMSNorm", {"num_features": WIDTH}, "llama"),
    ("xlstm", "xLSTMRMSNorm", {"num_features": WIDTH, "use_weight": False}, "llama"),
    ("xlstm", "xLSTMRMSNorm", {"num_features": WIDTH, "force_float32_reductions": False}, "no-upcast"),
    ("mamba2", "MambaRMSNormGated", {"hidden_size": WIDTH, "group_size": 16}, "gate-first"),
    ("zamba2", "Zamba2RMSNormGated", {"hidden_size": WIDTH, "group_size": WIDTH}, "gate-first"),
    ("qwen3_next", "Qwen3NextRMSNormGated", {"hidden_size": WIDTH}, "gated-silu"),
    ("qwen4_exp", "Qwen4ExpTextRMSNormGated", {"hidden_size": WIDTH, "activation": "sigmoid"}, "gated-sigmoid"),
    ("kimi_linear", "KimiLinearRMSNormGated", {"hidden_size": WIDTH}, "gated-sigmoid-cast-last"),
    ("falcon_h1", "FalconH1RMSNormGated", {"hidden_size": WIDTH, "n_groups": 3}, "gated-silu-cast-last"),
    (
        "falcon_h1",
        "FalconH1RMSNormGated",
        {"hidden_size": WIDTH, "n_groups": 3, "norm_before_gate": False},
        "gate-first-cast-last",
    ),
]


def site(module):
    return Site("norm", module, "cpu")


def build(model, name, arguments):
    pytest.importorskip("transformers")
    try:
        modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ImportError:
        pytest.skip(f"this version of transformers has no {model}")
    return getattr(modeling, name)(**arguments)


class DividesByRoot(nn.Module):
    """The norm of Gemma3n in transformers 4.57."""

    def __init__(self, width=WIDTH, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()).type_as(x)


class TwiceCast(nn.Module):
    """The norm of CpmAnt."""

    def __init__(self, width=WIDTH, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        mean_square = x.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
        return (x * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight


class Llama(nn.Module):
    def __init__(self, width=WIDTH, eps=1e-6):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.epsilon = eps

    def forward(self, x):
        wide = x.float()
        return self.gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


class FactorOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class MeanSubtracting(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def proposal_of(module):
    (proposal,) = match(site(module))
    return proposal


@pytest.mark.parametrize(("model", "name", "arguments", "variant"), TRANSFORMERS)
def test_exactly_the_right_variant_of_a_transformers_norm_is_bitwise_equal(survivors, model, name, arguments, variant):
    module = build(model, name, arguments)
    proposal = proposal_of(module)
    found, ran = survivors(module, proposal)
    assert [adapter.variant for adapter in found][:1] == [variant]
    assert {adapter.variant for adapter in found} == {variant}
    assert ran >= 3


@pytest.mark.parametrize(
    ("module", "variant"),
    [
        (DividesByRoot(), "cast-last-div"),
        (TwiceCast(), "llama-twice-cast"),
        (Llama(), "llama"),
        (Llama(eps=0.0), "llama"),
        (Llama(eps=1e-12), "llama"),
        (Llama(width=1), "llama"),
        (specimens.LlamaProduct(), "llama-product"),
        (specimens.CastLastProduct(), "cast-last-product"),
        (specimens.NoUpcastProduct(), "no-upcast-product"),
        (specimens.Functional(), "torch"),
        (nn.RMSNorm(WIDTH), "torch"),
        (nn.RMSNorm(WIDTH, eps=1e-5), "torch"),
        (nn.RMSNorm(WIDTH, elementwise_affine=False), "torch"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_other_ways_to_write_it_are_found_too(survivors, module, variant):
    found, ran = survivors(module, proposal_of(module))
    assert variant in {adapter.variant for adapter in found}
    assert ran >= 3


def test_every_variant_of_the_table_has_a_module_that_is_found_to_be_it():
    found = {variant for *_, variant in TRANSFORMERS} | {"cast-last-div", "llama-twice-cast", "torch"}
    found |= {"llama-product", "cast-last-product", "no-upcast-product"}
    assert found == set(reference.VARIANTS)


@pytest.mark.parametrize("module", [FactorOnly(), MeanSubtracting()], ids=["factor only", "mean-subtracting"])
def test_what_is_built_like_one_and_behaves_otherwise_is_no_variant(survivors, module):
    found, ran = survivors(module, proposal_of(module))
    assert ran >= 3
    assert not found


def _forgets_eps(x, weight=None, eps=1e-6, **how):
    return reference.rms_norm(x, weight, 0.0, **how)


def _takes_another_eps(x, weight=None, eps=1e-6, **how):
    return reference.rms_norm(x, weight, 2 * eps, **how)


def _zeros(x, weight=None, eps=1e-6, **how):
    return reference.rms_norm(x, weight, eps, **how) * 0


def _forgets_weight(x, weight=None, eps=1e-6, **how):
    return reference.rms_norm(x, torch.ones_like(weight) + 0 * weight, eps, **how)


def _cuts_gradient(x, weight=None, eps=1e-6, **how):
    return reference.rms_norm(x, weight.detach() + 0 * weight, eps, **how)


@pytest.mark.parametrize("wrong", [_forgets_eps, _takes_another_eps, _zeros, _forgets_weight, _cuts_gradient])
def test_the_examples_expose_a_wrong_implementation(survivors, wrong):
    module = Llama()
    found, _ = survivors(module, proposal_of(module), compute=wrong)
    assert not found


def test_the_examples_tell_w_from_one_plus_w(survivors):
    module = build("gemma", "GemmaRMSNorm", {"dim": WIDTH})
    proposal = proposal_of(module)
    plain = [NormAdapter("cast-last", "weight", "eps")]
    found, _ = survivors(module, type(proposal)(proposal.target, plain, proposal.example, proposal.mixes))
    assert not found


def test_eps_is_read_from_the_module_at_each_call():
    module, x = Llama(), torch.full((1, WIDTH), 1e-3)
    forward = NormAdapter("llama", "gamma", "epsilon").bind(reference.rms_norm)
    before = forward(module, x)
    module.epsilon = 0.0
    torch.testing.assert_close(forward(module, x), torch.ones(1, WIDTH))
    assert before.max() < 0.8


def test_an_eps_of_none_is_the_machine_epsilon_that_torch_takes():
    module, x = nn.RMSNorm(8), torch.full((1, 8), 1e-2, dtype=torch.bfloat16)
    forward = NormAdapter("torch", "weight", "eps").bind(reference.rms_norm)
    assert torch.equal(forward(module.bfloat16(), x), module(x))


def test_a_gate_is_optional_where_the_module_makes_it_so(survivors):
    module = build("mamba2", "MambaRMSNormGated", {"hidden_size": WIDTH, "group_size": 16})
    proposal = proposal_of(module)
    assert [mix.gate for mix in proposal.mixes].count(False) == 1
    _, ran = survivors(module, proposal)
    assert ran == len(proposal.mixes)


def test_a_norm_around_a_norm_says_which_one_is_fused():
    class GatedNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Llama()
            self.gate = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.norm(x)
            return y * torch.sigmoid(self.gate(y))

    said = match(site(GatedNorm()))
    assert isinstance(said, Rejection)
    assert "its norm is fused as a site of its own" in said.reason
    assert said.kind == "unlike"


def test_a_norm_with_a_bias_is_none_of_its_business():
    module = Llama()
    module.bias = nn.Parameter(torch.zeros(WIDTH))
    assert match(site(module)) is None


def test_a_weight_of_an_unsupported_dtype_is_rejected_by_name():
    said = match(site(Llama().double()))
    assert isinstance(said, Rejection)
    assert "gamma is torch.float64" in said.reason


def test_deepspeed_placeholders_count_with_their_true_shape():
    module = Llama()
    module.gamma.data = torch.empty(0)
    module.gamma.ds_shape = torch.Size([WIDTH])
    proposal = proposal_of(module)
    assert proposal.example(proposal.mixes[0], 64, torch.Generator()).parameters["gamma"].shape == (WIDTH,)


def test_a_weight_that_is_a_plain_attribute_is_found():
    module = Llama()
    del module.gamma
    module.gamma = torch.ones(WIDTH)
    assert proposal_of(module).adapters[0].weight == "gamma"
