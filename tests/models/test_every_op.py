"""Whole models with every kernel: each op is recognised, and logits and gradients stay the same."""

import sys

import pytest
import torch
import transformers
from support.parity import ROUNDINGS, assert_parity
from support.recurrences import reference_manager
from support.thorough import thorough
from support.tiny import BASE, EXPERTS, HEAD, TINY, build, exists, step
from survey.census import ops_of

from fuseplug import KernelManager

FIVE = transformers.__version__ >= "5"
NEXT = BASE | HEAD | EXPERTS | {"shared_expert_intermediate_size": 32}
NEXT |= {"layer_types": ["linear_attention", "full_attention"]}
NEXT |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
GEMMA3N = BASE | HEAD | {"num_kv_shared_layers": 0, "laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0]}
GEMMA3N |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 16}
GEMMA3N |= {"layer_types": ["sliding_attention", "full_attention"]}
MAMBA2 = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
MAMBA2 |= {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8}
GPTJ = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}
MORE = {
    "ernie4_5": BASE | HEAD,
    "gemma2": BASE | HEAD,
    "gemma3n_text": GEMMA3N,
    "gptj": GPTJ,
    "helium": BASE | HEAD,
    "mamba2": MAMBA2,
    "nemotron": BASE | HEAD,
    "qwen3_next": NEXT,
    "seed_oss": BASE | HEAD,
}
"""The arguments of configs for models that are not in `TINY`."""

VARIANTS = {
    "llama": "llama, silu, half",
    "qwen2": "llama, silu, half",
    "qwen3": "llama, silu, half",
    "qwen3_moe": "llama, half",
    "mixtral": "llama, half",
    "gemma": "gemma, gelu_tanh, half",
    "gemma3_text": "gemma, gelu_tanh, half",
    "phi3": "llama, silu gate-first, half-partial",
    "glm4": "llama, silu gate-first, interleaved-first-half-partial",
    "deepseek_v3": f"llama, silu, half, {'mla' if FIVE else 'mla-full-table'}",
    "gpt_oss": "cast-last, half-size",
    "cohere": "silu, interleaved-wide",
    "olmo2": "cast-last, silu, half-promoting",
    "nanochat": "llama, half-negated",
    "qwen2_5_vl": "llama, silu, half, half-vision",
    "ernie4_5": "llama, silu, interleaved-first-half-wide",
    "gemma2": "gemma, gelu_tanh, half",
    "gemma3n_text": f"cast-last-{'pow' if FIVE else 'div'}, gelu_tanh sparse, half",
    "gptj": "interleaved-repeated",
    "helium": "cast-last, silu, interleaved-first-half",
    "mamba2": f"llama, gate-first{', silu' if FIVE else ''}",
    "nemotron": "half-partial",
    "qwen3_next": "gemma, gated-silu, silu, half-partial",
    "seed_oss": "llama, silu, half",
}
"""All variants of norms, gated MLPs, rotations and convolutions in each model.

test_moe.py covers experts, and tests/recurrences/test_transformers.py covers delta rules and chunk scans."""

ELSEWHERE = ("moe", "linear_cross_entropy", "gated_delta_rule", "ssd")

UNLIKE = {"cohere": {("rmsnorm", "CohereLayerNorm")}}
"""Modules that are built like a fused one, but compute something else: this norm subtracts the mean."""
if not FIVE:
    UNLIKE |= {
        "mamba2": {("causal_conv1d", "Mamba2Mixer"), ("ssd", "Mamba2Mixer")},
        "qwen3_next": {("causal_conv1d", "Qwen3NextGatedDeltaNet"), ("gated_delta_rule", "Qwen3NextGatedDeltaNet")},
    }  # convolution and chunk scan are written out, and the delta rule is an attribute

QUICK = {(torch.bfloat16, "deepseek_v3")}
"""A model with every op: its first layer has a gated MLP, and its second has experts."""


def small(name, dtype):
    return build(name, dtype, **({} if name in TINY else MORE[name]))


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={})


def assert_all_fused(report, name):
    alone = [entry for entry in report.left_alone if not entry.covered_by]
    left_alone = {(op, entry.class_name) for entry in alone for op in ops_of(entry, report)}
    assert left_alone == UNLIKE.get(name, set()), report
    found = {entry.variant for entry in report.fused if entry.op not in ELSEWHERE}
    assert found == set(VARIANTS[name].split(", ")), report


# One process runs all models of a dtype: the models have the same widths, so they share compiled programs.
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(
            *(dtype, name),
            marks=[pytest.mark.xdist_group(str(dtype)), *([] if (dtype, name) in QUICK else [thorough])],
        )
        for dtype in ROUNDINGS
        for name in VARIANTS
    ],
    ids=str,
)
def test_all_is_fused_and_logits_and_gradients_are_those_of_the_unfused_model(manager, name, dtype):
    if not exists(name):
        pytest.skip("not in this version of transformers")
    # In the first half, only the tests of each op check the kernels: a check takes longer than everything else.
    options = {"verify": (dtype, name) not in QUICK, "allow": "lazy_logits"}
    assert_all_fused(assert_parity(manager, small(name, dtype), step, **options), name)


@thorough
@pytest.mark.xdist_group(str(torch.bfloat16))
def test_they_are_with_everything_compiled(manager, everything_compiled):
    assert_parity(manager, build("deepseek_v3", torch.bfloat16), step, allow="lazy_logits")


@thorough
@pytest.mark.skipif(not FIVE, reason="there experts are lists, whose loop depends on the routing")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_kernels_that_stay_in_a_compiled_model_leave_it_one_graph(name):
    """The kernels for GPUs and NPUs stay in compiled models."""
    model, tokens = build(name), torch.arange(24).view(2, 12) + 3
    before, programs = model(tokens, use_cache=False).logits, []

    def backend(program, _):
        programs.append(str(program.graph))
        return program.forward

    with reference_manager("moe", "rmsnorm", "rope", "swiglu").apply_all(model, verify=False):
        result = torch.compile(model, backend=backend)(tokens, use_cache=False).logits
    assert ["fuseplug_moe" in program for program in programs] == [True]
    torch.testing.assert_close(result, before, rtol=1e-4, atol=1e-5)


def rotary_globals():
    """The rotary functions of all loaded modeling files, by module and name."""
    return {
        (name, function): getattr(module, function)
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and ".modeling_" in name
        for function in vars(module)
        if "rotary_" in function and function.startswith("apply")
    }


def test_another_model_of_the_same_classes_is_untouched(manager):
    teacher, student = build("qwen3"), build("qwen3")
    before, functions = step(teacher), rotary_globals()
    with manager.apply_all(student, verify=False):
        assert manager.applied_to(teacher) is None
        assert rotary_globals() == functions
        during = step(teacher)
    assert rotary_globals() == functions
    assert all(torch.equal(during[name], value) for name, value in before.items())


@thorough
def test_a_large_model_is_checked_with_the_compiled_programs_and_runs_them(manager):
    model, exact = (build("qwen3", num_hidden_layers=1).to(dtype) for dtype in (torch.bfloat16, torch.float64))
    exact.load_state_dict(model.state_dict())
    tokens = torch.arange(4 * 1024).view(4, 1024) % 60 + 1
    with torch.no_grad():
        truth, unfused = (m(input_ids=tokens).logits for m in (exact, model))
        with manager.apply_all(model) as applied:
            assert {entry.check for entry in applied.report.fused} == {"passed"}
            fused = model(input_ids=tokens).logits
    assert (fused - truth).abs().mean() <= 1.1 * (unfused - truth).abs().mean()
