"""DeepSpeed's ZeRO in two processes: fused before `deepspeed.initialize` and after, and where it splits what is made."""

from __future__ import annotations

import os

import pytest
import torch
from support.ranks import failures, same_on_all
from support.states import differing, state_of
from support.tiny import TINY, build
from torch import distributed

from fuseplug import KernelManager

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not distributed.is_available(), reason="this torch has no distributed"),
    pytest.mark.xdist_group("deepspeed"),  # all that is asked is of one run
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


def made(split=False, low=False):
    """A model; *split* as transformers makes it where the Trainer's DeepSpeed is at stage 3."""
    if not split:
        return build("deepseek_v3").train()
    import deepspeed
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("deepseek_v3", **TINY["deepseek_v3"])
    with deepspeed.zero.Init(config_dict_or_path=settings(3, low)):
        return transformers.AutoModelForCausalLM.from_config(config).train()


def losses(engine):
    found = []
    for number in range(STEPS):
        ids = (torch.arange(24).view(2, 12) * 7 + number + distributed.get_rank()) % 57 + 3
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    return torch.stack(found)


def whole(model):
    """All parameters, gathered where they are split."""
    import deepspeed

    parameters = dict(model.named_parameters())
    split = [each for each in parameters.values() if hasattr(each, "ds_id")]
    with deepspeed.zero.GatheredParameters(split):
        return {name: each.detach().clone() for name, each in parameters.items()}


def check(order, stage, low=False):
    os.environ |= {"LOCAL_RANK": str(distributed.get_rank()), "DS_ACCELERATOR": "cpu"}
    split = order == "split"
    model = made(split, low)
    engine = initialized(model, stage, low) if order == "after" else None
    before = state_of(model)
    applied = KernelManager().apply_all(model, include=KERNELS, verify=False)
    same_on_all([(entry.paths, str(entry.target), entry.kernel_id, entry.why_not) for entry in applied.report.entries])
    print(order, stage, applied.report)
    engine = engine or initialized(model, stage, low)
    found, reached = losses(engine), whole(model)
    # ZeRO-3 changes torch for the whole process, so that a second engine comes after what is asked of the first.
    unfused = initialized(made(split, low), stage, low)
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if low else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(found, losses(unfused), **tolerance)
    torch.testing.assert_close(reached, whole(unfused.module), **tolerance)
    for calls in applied.calls():
        print(order, stage, low, calls)
    assert applied.lost == []
    print(order, stage, applied.check_in_use(1))
    applied.undo()
    if order != "before":
        print(differing(before, state_of(model)))
    assert not any("forward" in vars(module) for module in model.modules())


CASES = [*((order, stage, False) for order in ("before", "after") for stage in (1, 2, 3)), ("split", 3, False), ("before", 2, True), ("after", 3, True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_trains_as_unfused(case):
    pytest.importorskip("deepspeed")
    assert not failures(check, [case])
