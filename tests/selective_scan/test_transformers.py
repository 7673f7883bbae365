"""The selective scans of transformers: whole models compute what they did, and every class is found."""

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
from fuseplug_selective_scan.recognise.adapters import ScanAdapter
from fuseplug_selective_scan.recognise.structure import scans, steps
from fuseplug_selective_scan.reference import selective_scan

five = pytest.mark.skipif(transformers.__version__ < "5", reason="there the scans are written out")
pytestmark = pytest.mark.usefixtures("small_checks")

MODELS = {
    "mamba": (BASE | {"state_size": 4}, 2, 1),
    "zamba": (
        BASE
        | {"num_key_value_heads": 4, "mamba_d_state": 4, "mamba_dt_rank": 4, "hidden_act": "silu"}
        | {"layers_block_type": ["hybrid", "hybrid"], "use_mamba_kernels": False},
        2,
        2,
    ),
    "jamba": (
        BASE
        | {"mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
        | {"num_experts": 1, "num_experts_per_tok": 1},
        1,
        1,
    ),
    "falcon_mamba": (BASE | {"state_size": 4}, 2, 1),
}
"""The arguments of each config, the number of mixers, and how many scans each makes."""

SCAN, STEP = "mamba_selective_scan", "mamba_selective_state_update"

QUICK = [("mamba", torch.bfloat16), ("zamba", torch.float32)]


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": "inductor_fused_selective_scan", "FUSEPLUG_EVERY_SIZE": "1"})


def counts(applied, function):
    """How many calls of each mixer were the kernel's, and the original's."""
    return [(count.fused, count.original) for count in applied.calls() if count.target.function == function]


def made(name, dtype=torch.float32):
    return build(name, dtype, **MODELS[name][0])


def in_float64(model):
    """What a step of *model*, which is left in float64, gives with the formula in the place of its own function.

    That makes what it adds to the states in float32, whatever it is given.
    """
    module = importlib.import_module(type(model).__module__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, SCAN, ScanAdapter().bind(selective_scan))
        return step(model.double())


@five
@pytest.mark.parametrize(
    ("name", "dtype"), first_quick(sorted(itertools.product(MODELS, ROUNDINGS), key=lambda row: row not in QUICK), 2)
)
def test_logits_and_gradients_are_as_near_to_the_truth_as_those_of_the_unfused_model(manager, name, dtype):
    model, number = made(name, dtype), MODELS[name][1]
    before = step(model)
    with manager.apply_all(model) as applied:
        assert sum(len(entry.paths) for entry in applied.report.fused) == 2 * number, applied.report
        fused = step(model)
        assert all(original == 0 < fused for fused, original in counts(applied, SCAN))
    after = step(model)
    truth = in_float64(model)
    assert fused.keys() == before.keys()
    for key, unfused in before.items():
        assert (fused[key].dtype, fused[key].shape) == (unfused.dtype, unfused.shape)
        allowed = 2 * distance(unfused, truth[key]) + ROUNDINGS[dtype] * torch.finfo(dtype).eps
        assert distance(fused[key], truth[key]) <= allowed, key
        assert torch.equal(after[key], unfused)


@five
@pytest.mark.parametrize("name", first_quick(map(pytest.param, MODELS), 2))
def test_training_under_autocast_and_generation_are_computed_by_the_kernel(manager, name):
    model, (_, number, scans) = made(name).eval(), MODELS[name]
    tokens = torch.arange(48).view(2, 24) + 3

    def generated():
        return model.generate(tokens, max_new_tokens=4, do_sample=False)

    def continued():
        with torch.no_grad():
            first = model(tokens[:, :12], use_cache=True)
            past = next(name for name in ("cache_params", "past_key_values") if name in first)
            return model(tokens[:, 12:], **{past: first[past]}).logits

    before = generated(), continued()
    with manager.apply_all(model) as applied:
        model(tokens, labels=tokens).loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens, labels=tokens).loss.backward()
        assert counts(applied, SCAN) == [(2 * scans, 0)] * number
        assert torch.equal(generated(), before[0])
        assert counts(applied, SCAN) == [(3 * scans, 0)] * number
        assert counts(applied, STEP) == [(3 * scans, 0)] * number
        torch.testing.assert_close(continued(), before[1], rtol=1e-4, atol=1e-5)
        assert counts(applied, SCAN) == [(5 * scans, 0)] * number


@five
@pytest.mark.thorough
def test_every_function_of_transformers_is_found():
    for name, wanted in ((SCAN, scans), (STEP, steps)):
        found = targets_beside(name, lambda cls, wanted=wanted: looked_up(cls, wanted))
        for folder, targets in found.items():
            assert {*targets} == {f"forward:{name}"}, folder
        assert len(found) >= 4


@pytest.mark.skipif(transformers.__version__ >= "5", reason="there a function is looked up")
def test_a_scan_that_is_written_out_is_left_alone_with_a_reason(manager):
    report = manager.plan(made("mamba")).report
    assert not report.fused
    assert report.left_alone
    assert all("its selective scan is written out in its forward" in entry.why_not for entry in report.left_alone)
