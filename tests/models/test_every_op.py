"""Whole models with every kernel at once: what they compute, forward and backward, is what it was."""

from __future__ import annotations

import pytest
import torch
from support.tiny import TINY, build, exists, in_float64, step

from fuseplug import KernelManager

MODELS = [
    pytest.param(name, marks=() if exists(name) else pytest.mark.skip(reason="not in this version of transformers"))
    for name in TINY
]
ROOM = 4
"""How much further from the truth than the unfused model a fused one may be, in roundings of the tensor's scale."""


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={})


@pytest.mark.parametrize("name", MODELS)
def test_every_gate_norm_rotation_and_expert_is_fused(manager, name):
    report = manager.plan(build(name)).report
    assert not report.left_alone, report


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_and_gradients_are_those_of_the_unfused_model(manager, name, dtype):
    model = build(name).to(dtype)
    truth, before = step(in_float64(name, model)), step(model)

    with manager.apply_all(model) as applied:
        assert applied.report.fused
        fused = step(model)

    assert fused.keys() == before.keys()
    for key, unfused in before.items():
        assert (fused[key].dtype, fused[key].shape) == (unfused.dtype, unfused.shape)
        allowed = 2 * distance(unfused, truth[key]) + ROOM * torch.finfo(dtype).eps
        assert distance(fused[key], truth[key]) <= allowed, key
    after = step(model)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def distance(found, true):
    """How far *found* is from *true*, as a share of its size."""
    return ((found.double() - true).norm() / true.norm().clamp_min(1e-30)).item()
