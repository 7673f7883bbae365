"""DeepSpeed's ZeRO in two processes: fused before `deepspeed.initialize` and after."""

from __future__ import annotations

import os

import pytest
import torch
from support.ranks import failures, same_on_all
from support.tiny import build
from torch import distributed

from fuseplug import KernelManager

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not distributed.is_available(), reason="this torch has no distributed"),
]

KERNELS = ["inductor_fused_rmsnorm", "inductor_fused_swiglu", "inductor_fused_rope", "inductor_fused_moe"]
STEPS = 3


def settings(stage, low=False):
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # or it keeps small parameters whole, and all of these are small
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    return config | ({"bf16": {"enabled": True}} if low else {})


def initialized(model, stage, low=False):
    import deepspeed

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage, low))[0]


def made(order):
    model = build("deepseek_v3").train()
    if order == "leaves":
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, [type(model.model.layers[0].mlp), type(model.model.layers[1].mlp.experts)])
    return model


def losses(engine, after_step=lambda: None):
    found = []
    for number in range(STEPS):
        ids = (torch.arange(24).view(2, 12) * 7 + number + distributed.get_rank()) % 57 + 3
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        after_step()
        found.append(loss.detach())
    return torch.stack(found)


def whole(model):
    """All parameters, gathered where they are split."""
    import deepspeed

    parameters = dict(model.named_parameters())
    split = [each for each in parameters.values() if hasattr(each, "ds_id")]
    with deepspeed.zero.GatheredParameters(split):
        return {name: each.detach().clone() for name, each in parameters.items()}


def check(order, stage, low):
    os.environ |= {"LOCAL_RANK": str(distributed.get_rank()), "DS_ACCELERATOR": "cpu"}
    model = made(order)
    engine = initialized(model, stage, low) if order == "after" else None
    applied = KernelManager().apply_all(model, include=KERNELS, verify=False)
    same_on_all([(entry.paths, str(entry.target), entry.kernel_id, entry.why_not) for entry in applied.report.entries])
    engine = engine or initialized(model, stage, low)
    found, reached = losses(engine, applied.check_in_use), whole(model)
    # ZeRO-3 changes torch for the whole process: the other engine comes after all that is asked of this one.
    unfused = initialized(made(order), stage, low)
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if low else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(found, losses(unfused), **tolerance)
    torch.testing.assert_close(reached, whole(unfused.module), **tolerance)

    computed = {calls.kernel_id for calls in applied.calls() if calls.fused}
    idle = {each.kernel_id: each.why for each in applied.check_in_use() if "the original computed" in each.why}
    if stage < 3 or order == "leaves":
        assert computed == set(KERNELS)
        assert not idle
    else:
        assert computed == {"inductor_fused_rmsnorm", "inductor_fused_rope"}
    if order == "before" and stage == 3:
        assert idle.keys() == set(KERNELS) - computed
        assert all("act_fn is a plain SiLUActivation, without hooks" in why for why in idle.values())
    assert applied.lost == []
    applied.undo()
    assert not any("forward" in vars(module) for module in model.modules())


CASES = [
    *((order, stage, False) for order in ("before", "after") for stage in (1, 2, 3)),
    ("leaves", 3, False),
    ("before", 2, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_trains_as_unfused_and_says_what_its_hooks_leave_to_the_originals(case):
    pytest.importorskip("deepspeed")
    # Each in processes of its own, because of what ZeRO-3 changes.
    assert not failures(check, [case])
