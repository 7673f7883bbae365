"""Whole models with every kernel at once: what they compute, forward and backward, is what it was."""

from __future__ import annotations

import pytest
import torch
from support.parity import ROUNDINGS, assert_parity
from support.thorough import thorough
from support.tiny import TINY, build, exists, step

from fuseplug import KernelManager

MODELS = [
    pytest.param(name, marks=() if exists(name) else pytest.mark.skip(reason="not in this version of transformers"))
    for name in TINY
]
UNLIKE = {"cohere": {("rmsnorm", "CohereLayerNorm")}}
"""What is built like something fused and is something else: this norm subtracts the mean."""

# The models share their widths, so one process compiles for all of them what another would compile again.
DTYPES = {dtype: [pytest.mark.xdist_group(str(dtype))] for dtype in ROUNDINGS}


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={})


@pytest.mark.parametrize("name", MODELS)
def test_every_norm_gate_rotation_expert_and_head_is_fused(manager, name):
    report = manager.plan(build(name), verify=False, allow="lazy_logits").report
    left_alone = {(entry.op, entry.class_name) for entry in report.left_alone if not entry.covered_by}
    assert left_alone == UNLIKE.get(name, set()), report


QUICK = {(torch.bfloat16, "deepseek_v3")}
"""Every op in one model: its first layer has a gated MLP, its second experts."""


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(dtype, name, marks=[*DTYPES[dtype], *model.marks, *([] if (dtype, name) in QUICK else [thorough])])
        for dtype in ROUNDINGS
        for model in MODELS
        for name in model.values
    ],
    ids=str,
)
def test_logits_and_gradients_are_those_of_the_unfused_model(manager, name, dtype):
    assert_parity(manager, build(name, dtype), step, allow="lazy_logits")


@thorough
@pytest.mark.xdist_group(str(torch.bfloat16))
def test_they_are_with_everything_compiled(manager, everything_compiled):
    assert_parity(manager, build("deepseek_v3", torch.bfloat16), step, allow="lazy_logits")
