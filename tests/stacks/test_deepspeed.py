"""DeepSpeed's ZeRO in two processes: models fused before and after `deepspeed.initialize`, or split while loading."""

import contextlib
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
LEFT_TO_ORIGINALS = {
    "before": (("swiglu", "moe"), ()),
    "loaded": (("swiglu",), ("moe",)),
    "after": ((), ("swiglu", "moe")),
}
"""For ZeRO-3, by order: the ops of the kernels that are then not in use, and the ops that are left alone."""


def settings(stage, low=False):
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # or ZeRO-3 keeps small parameters whole, as all here are
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


def made(order, folder):
    model = loaded(folder) if order == "loaded" else build("deepseek_v3").train()
    if order == "leaves":
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, [type(model.model.layers[0].mlp), type(model.model.layers[1].mlp.experts)])
    return model


def loaded(folder):
    """A model that ``from_pretrained`` splits, so that no process ever has all of it."""
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    asks_for_zero3 = HfDeepSpeedConfig(settings(3))  # noqa: F841 - works while it is alive
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    assert all(each.numel() == 0 for each in model.parameters())
    return model


def called(engine, number=0):
    ids = (torch.arange(24).view(2, 12) * 7 + number + distributed.get_rank()) % 57 + 3
    return engine(input_ids=ids, labels=ids, use_cache=False)


def losses(engine, after_step=lambda: None):
    found = []
    for number in range(STEPS):
        found.append(called(engine, number).loss)
        engine.backward(found[-1])
        engine.step()
        after_step()
    return torch.stack(found).detach()


@contextlib.contextmanager
def gathered(model, writer=None):
    """All parameters by name, gathered. If they are split, the changes of rank *writer* are kept."""
    import deepspeed

    parameters = dict(model.named_parameters())
    split = [each for each in parameters.values() if hasattr(each, "ds_id")]
    with deepspeed.zero.GatheredParameters(split, modifier_rank=writer), torch.no_grad():
        yield parameters


def whole(model):
    with gathered(model) as parameters:
        return {name: each.clone() for name, each in parameters.items()}


def put(model, values):
    with gathered(model, writer=0) as parameters:
        for name, each in parameters.items():
            each.copy_(values[name])


def is_classes_own(model):
    """Whether no module has a forward or a call of its own, ours or anybody else's."""
    return not any(name in vars(module) for module in model.modules() for name in ("forward", "__call__"))


def check(folder, order, stage, low):
    os.environ |= {"LOCAL_RANK": str(distributed.get_rank()), "DS_ACCELERATOR": "cpu"}
    model = made(order, folder)
    engine = initialized(model, stage, low) if order == "after" else None
    applied = KernelManager().apply_all(model, include=KERNELS, verify=False)
    same_on_all([(entry.paths, str(entry.target), entry.kernel_id, entry.why_not) for entry in applied.report.entries])
    engine = engine or initialized(model, stage, low)
    found, reached = losses(engine, applied.check_in_use), whole(model)
    # ZeRO-3 changes torch for the whole process, so the other engine comes after everything that uses this one.
    unfused = initialized(made(order, folder), stage, low)
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if low else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(found, losses(unfused), **tolerance)
    torch.testing.assert_close(reached, whole(unfused.module), **tolerance)

    computed = {calls.kernel_id.removeprefix("inductor_fused_") for calls in applied.calls() if calls.fused}
    idle = {each.kernel_id: each.why for each in applied.check_in_use() if "the original computed" in each.why}
    declined = {entry.op: entry.why_not for entry in applied.report.left_alone}
    originals = LEFT_TO_ORIGINALS.get(order, ((), ())) if stage == 3 else ((), ())
    assert computed == {"rmsnorm", "rope", "swiglu", "moe"}.difference(*originals)
    assert (idle.keys(), declined.keys()) == ({f"inductor_fused_{op}" for op in originals[0]}, {*originals[1]})
    hooked = "act_fn is a plain SiLUActivation, without hooks (there are some of deepspeed)"
    assert all(hooked in why for why in idle.values())
    if "swiglu" in declined:
        assert hooked in declined["swiglu"]
    if "moe" in declined:  # experts use torch's linear, which ZeRO-3 has replaced
        assert " of deepspeed." in declined["moe"]
    assert applied.lost == []
    before = sum(calls.fused for calls in applied.calls())
    applied.undo()
    assert is_classes_own(model)
    put(unfused.module, whole(model))
    assert torch.equal(called(engine).logits, called(unfused).logits)
    assert sum(calls.fused for calls in applied.calls()) == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model, path = build("deepseek_v3"), tmp_path_factory.mktemp("model")
    model.config.pad_token_id = None  # transformers would zero its row of the embedding, which is empty under ZeRO-3
    model.save_pretrained(path)
    return str(path)


CASES = [
    *((order, stage, False) for order in ("before", "after") for stage in (1, 2, 3)),
    ("leaves", 3, False),
    ("loaded", 3, False),
    ("before", 2, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_trains_as_unfused_and_says_what_its_hooks_leave_to_the_originals(folder, case):
    pytest.importorskip("deepspeed")
    # Each case has its own processes, because ZeRO-3 changes torch.
    assert not failures(check, [(folder, *case)])
