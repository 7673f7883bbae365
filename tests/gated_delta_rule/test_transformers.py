"""The gated delta rules of transformers: whole models compute what they did, and every class is found."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
import transformers
from support.delta_rules import MODELS
from support.modeling_files import targets_beside
from support.parity import ROUNDINGS, distance
from support.thorough import first_quick
from support.tiny import build, step

from fuseplug import KernelManager
from fuseplug_gated_delta_rule.recognise.adapters import DeltaRuleAdapter
from fuseplug_gated_delta_rule.recognise.structure import _targets
from fuseplug_gated_delta_rule.reference import gated_delta_rule

pytestmark = [
    pytest.mark.skipif(transformers.__version__ < "5", reason="there the functions are attributes of the modules"),
    pytest.mark.usefixtures("small_checks"),
]

QUICK = [("qwen3_5_text", torch.bfloat16), ("kimi_linear", torch.float32)]

FUNCTIONS = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
"""For many tokens, and for a step of decoding."""


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": "inductor_fused_gated_delta_rule", "FUSEPLUG_EVERY_SIZE": "1"})


def made(name, dtype=torch.float32):
    return build(name, dtype, **MODELS[name][0])


def in_float64(model, variant):
    """What a step of *model*, which is left in float64, gives with the formula in the place of its own function.

    That computes in float32 whatever it is given, and the gradients of its decays have lost a digit or two.
    """
    module = importlib.import_module(type(model).__module__)
    name = next(name for name in FUNCTIONS if hasattr(module, name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, DeltaRuleAdapter(variant).bind(gated_delta_rule))
        return step(model.double())


@pytest.mark.parametrize(
    ("name", "dtype"), first_quick(sorted(itertools.product(MODELS, ROUNDINGS), key=lambda row: row not in QUICK), 2)
)
def test_logits_and_gradients_are_as_near_to_the_truth_as_those_of_the_unfused_model(manager, name, dtype):
    model, variant = made(name, dtype), MODELS[name][1]
    before = step(model)
    with manager.apply_all(model) as applied:
        assert [(entry.variant, len(entry.paths)) for entry in applied.report.fused] == [(variant, 1)] * 2, (
            applied.report
        )
        fused = step(model)
    after = step(model)
    truth = in_float64(model, variant)
    assert fused.keys() == before.keys()
    for key, unfused in before.items():
        assert (fused[key].dtype, fused[key].shape) == (unfused.dtype, unfused.shape)
        allowed = 2 * distance(unfused, truth[key]) + ROUNDINGS[dtype] * torch.finfo(dtype).eps
        assert distance(fused[key], truth[key]) <= allowed, key
        assert torch.equal(after[key], unfused)


@pytest.mark.parametrize("name", first_quick(MODELS))
def test_training_under_autocast_and_generation_are_computed_by_the_kernel(manager, name):
    model = made(name).eval()
    tokens = torch.arange(24).view(2, 12) + 3

    def generated():
        return model.generate(tokens, max_new_tokens=4, do_sample=False)

    def continued():
        with torch.no_grad():
            past = model(tokens[:, :7], use_cache=True).past_key_values
            return model(tokens[:, 7:], past_key_values=past).logits

    before = generated(), continued()
    with manager.apply_all(model) as applied:
        model(tokens, labels=tokens, num_items_in_batch=torch.tensor(22)).loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens, labels=tokens).loss.backward()
        assert [(count.fused, count.original) for count in applied.calls()] == [(2, 0), (0, 0)]
        # A step of decoding calls another function.
        assert torch.equal(generated(), before[0])
        assert [(count.fused, count.original) for count in applied.calls()] == [(3, 0), (3, 0)]
        torch.testing.assert_close(continued(), before[1], rtol=1e-4, atol=1e-5)
        assert [(count.fused, count.original) for count in applied.calls()] == [(5, 0), (3, 0)]


@pytest.mark.thorough
def test_every_function_of_transformers_is_found():
    folders = set()
    for name, step_name in FUNCTIONS.items():
        for folder, targets in targets_beside(name, _targets).items():
            assert targets == {f"forward:{name}": False, f"forward:{step_name}": True}, folder
            folders.add(folder)
    assert len(folders) >= 8
