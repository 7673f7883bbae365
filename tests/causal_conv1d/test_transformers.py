"""The convolutions of transformers: whole models compute what they did before, and every class is found."""

import pytest
import torch
import transformers
from support.modeling_files import targets_beside
from support.parity import ROUNDINGS, assert_parity
from support.tiny import BASE, HEAD, build, step

from fuseplug import KernelManager
from fuseplug_backends.looked_up import looked_up
from fuseplug_causal_conv1d.recognise.structure import convolves

pytestmark = [
    pytest.mark.skipif(transformers.__version__ < "5", reason="there the convolutions are written out"),
    pytest.mark.usefixtures("small_checks"),
]

LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MODELS = {
    "qwen3_5_text": (BASE | HEAD | LINEAR | {"layer_types": ["linear_attention", "full_attention"]}, "silu", 1),
    "mamba": (BASE | {"state_size": 4}, "silu", 2),
    "lfm2": (BASE | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96}, "identity", 1),
}
"""For each model, the arguments of its config, the variant, and the number of convolutions."""


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": "inductor_fused_causal_conv1d"})


def made(name, dtype=torch.float32):
    return build(name, dtype, **MODELS[name][0])


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_the_unfused_model(manager, name, dtype):
    _, variant, number = MODELS[name]
    report = assert_parity(manager, made(name, dtype), step)
    assert {entry.variant for entry in report.fused} == {variant}
    assert sum(len(entry.paths) for entry in report.fused) == number, report


@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_computes_training_steps_under_autocast_and_with_further_keywords(manager, name):
    model = made(name)
    tokens = torch.arange(24).view(2, 12)
    with manager.apply_all(model) as applied:
        model(tokens, labels=tokens, num_items_in_batch=torch.tensor(22)).loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens, labels=tokens).loss.backward()
        assert {(count.fused, count.original) for count in applied.calls()} == {(2, 0)}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_generated_is_the_same(manager, name):
    model = made(name)
    tokens = torch.arange(24).view(2, 12) + 3
    how = {"max_new_tokens": 4, "do_sample": False}
    before = model.generate(tokens, **how)
    with manager.apply_all(model) as applied:
        assert torch.equal(model.generate(tokens, **how), before)
        # A decoding step calls another function, which is left alone.
        assert {(count.fused, count.original) for count in applied.calls()} == {(1, 0)}


@pytest.mark.thorough
def test_every_function_of_transformers_is_found():
    found = targets_beside("causal_conv1d_fn", lambda cls: looked_up(cls, convolves))
    for folder, targets in found.items():
        assert {*targets} == {"forward:causal_conv1d_fn"}, folder
    assert len(found) >= 22
