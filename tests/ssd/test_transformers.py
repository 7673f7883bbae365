"""The chunk scans of transformers: whole models compute what they did, and every class is found."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
import transformers
from support.modeling_files import targets_beside
from support.parity import ROUNDINGS, distance
from support.thorough import first_quick
from support.tiny import BASE, build, step

from fuseplug import KernelManager
from fuseplug_backends.looked_up import looked_up
from fuseplug_ssd.recognise.adapters import ChunkScanAdapter
from fuseplug_ssd.recognise.structure import chunk_scans
from fuseplug_ssd.reference import ssd

five = pytest.mark.skipif(transformers.__version__ < "5", reason="there the scans are written out")
pytestmark = pytest.mark.usefixtures("small_checks")

MAMBA = {"mamba_d_state": 4, "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
MODELS = {
    "mamba2": BASE | {"state_size": 4, "num_heads": 16, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_h1": BASE | MAMBA | {"mamba_d_ssm": 128},
    "bamba": BASE | MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": BASE
    | MAMBA
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32},
    "nemotron_h": BASE
    | {"ssm_state_size": 4, "mamba_num_heads": 16, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8}
    | {"hybrid_override_pattern": "M*", "mamba_hidden_act": "silu"},
    "zamba2": BASE
    | {"mamba_d_state": 4, "mamba_headdim": 8, "n_mamba_heads": 16, "mamba_ngroups": 2, "chunk_size": 8}
    | {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4},
}
QUICK = [("mamba2", torch.bfloat16), ("falcon_h1", torch.float32)]


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": "inductor_fused_ssd", "FUSEPLUG_EVERY_SIZE": "1"})


def made(name, dtype=torch.float32):
    return build(name, dtype, **MODELS[name])


def in_float64(model):
    """What a step of *model*, which is left in float64, gives with the formula in the place of its own function.

    That computes in float32, whatever it is given.
    """
    module = importlib.import_module(type(model).__module__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mamba2_chunk_scan", ChunkScanAdapter().bind(ssd))
        return step(model.double())


@five
@pytest.mark.parametrize(
    ("name", "dtype"), first_quick(sorted(itertools.product(MODELS, ROUNDINGS), key=lambda row: row not in QUICK), 2)
)
def test_logits_and_gradients_are_as_near_to_the_truth_as_those_of_the_unfused_model(manager, name, dtype):
    model = made(name, dtype)
    before = step(model)
    with manager.apply_all(model) as applied:
        assert applied.report.fused
        assert not applied.report.left_alone, applied.report
        fused = step(model)
        assert all(count.original == 0 < count.fused for count in applied.calls())
    after = step(model)
    truth = in_float64(model)
    assert fused.keys() == before.keys()
    for key, unfused in before.items():
        assert (fused[key].dtype, fused[key].shape) == (unfused.dtype, unfused.shape)
        allowed = 2 * distance(unfused, truth[key]) + ROUNDINGS[dtype] * torch.finfo(dtype).eps
        assert distance(fused[key], truth[key]) <= allowed, key
        assert torch.equal(after[key], unfused)


@five
def test_training_under_autocast_and_prompts_are_computed_by_the_kernel(manager):
    model = made("mamba2").eval()
    tokens = torch.arange(48).view(2, 24) + 3

    def continued():
        with torch.no_grad():
            first = model(tokens[:, :12], use_cache=True)
            return model(tokens[:, 12:], cache_params=first.cache_params).logits

    expected = model.generate(tokens, max_new_tokens=4, do_sample=False), continued()
    with manager.apply_all(model) as applied:
        model(tokens, labels=tokens).loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens, labels=tokens).loss.backward()
        assert [(count.fused, count.original) for count in applied.calls()] == [(2, 0)] * 2
        # A step of decoding calls another function.
        assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), expected[0])
        torch.testing.assert_close(continued(), expected[1], rtol=1e-4, atol=1e-5)
        assert [(count.fused, count.original) for count in applied.calls()] == [(5, 0)] * 2


@five
@pytest.mark.thorough
def test_every_function_of_transformers_is_found():
    found = targets_beside("mamba2_chunk_scan", lambda cls: looked_up(cls, chunk_scans))
    for folder, targets in found.items():
        assert {*targets} == {"forward:mamba2_chunk_scan"}, folder
    assert len(found) >= 6


@pytest.mark.skipif(transformers.__version__ >= "5", reason="there a function is looked up")
def test_a_scan_that_is_written_out_is_left_alone_with_a_reason(manager):
    report = manager.plan(made("mamba2")).report
    assert not report.fused
    assert report.left_alone
    assert all("its chunk scan is written out in its forward" in entry.why_not for entry in report.left_alone)
