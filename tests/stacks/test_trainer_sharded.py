"""`FuseplugCallback` in a Trainer of two processes: DDP, FSDP2 and FSDP1."""

import os

import pytest
import torch
from support.ranks import failures, same_on_all
from support.tiny import build
from support.trainer import losses, rows, trainer_of
from torch import distributed

from fuseplug import KernelManager

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not distributed.is_available(), reason="this torch has no distributed"),
    pytest.mark.xdist_group("trainer-sharded"),  # all tests ask about one run
]

KERNELS = ["inductor_fused_rmsnorm", "inductor_fused_swiglu", "inductor_fused_rope"]
ROWS = rows(57)


def fsdp(version, **options):
    wrapped = {"version": version, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"], **options}
    wrapped["sync_module_states"] = False  # syncing needs an accelerator
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": wrapped}


WAYS = {
    "copies": {},
    "FSDP2": fsdp(2),
    "FSDP2, checkpointed": fsdp(2, activation_checkpointing=True),
    "FSDP2, in bfloat16": fsdp(2) | {"bf16": True},
    "FSDP1": fsdp(1),
}
WRAPPED = {
    "copies": ("DistributedDataParallel", "Parameter"),
    "FSDP2": ("FSDPQwen3ForCausalLM", "DTensor"),
    "FSDP1": ("FullyShardedDataParallel", "Parameter"),
}


def trained(folder, way, callbacks=()):
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]  # left by the case before
    # The Trainer of 4.57 takes no version. It uses the version that `accelerate launch` puts here.
    os.environ["FSDP_VERSION"] = str(WAYS[way].get("fsdp_config", {}).get("version", 1))
    model = build("qwen3").train()
    model.config.use_cache = False  # 4.57 would fill the cache of checkpointed layers twice
    # Not Adam: it moves a weight with a gradient near zero as far as any other, in the direction of its last bit.
    trainer = trainer_of(folder, model, ROWS, callbacks, optim="sgd", **WAYS[way])
    trainer.train()
    return trainer


def kinds(trainer):
    """The names of the classes of the wrapped model and of its parameters."""
    parameter = next(trainer.model.parameters())
    return type(trainer.model_wrapped).__name__, type(parameter).__name__


def held(trainer):
    """This rank's part of every parameter."""
    return [getattr(each, "_local_tensor", each) for each in trainer.model_wrapped.parameters()]


def parts(trainer):
    return [each.detach().clone() for each in held(trainer)]


def logits(trainer):
    return trainer.model_wrapped(input_ids=torch.stack([row["input_ids"] for row in ROWS])).logits


def check(folder, way):
    from support.accelerating import shard_on_cpus

    from fuseplug_tools.integrations.transformers import FuseplugCallback

    rank = str(distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1"}
    shard_on_cpus()
    want = trained(folder, way)
    callback = FuseplugCallback(manager=KernelManager(), include=KERNELS, verify=False)
    found = trained(folder, way, [callback])
    assert kinds(found) == kinds(want) == WRAPPED[way.partition(",")[0]]
    wide = {"rtol": 2e-2, "atol": 1e-2} if "bfloat16" in way else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(losses(found), losses(want), **wide)
    torch.testing.assert_close(parts(found), parts(want), **wide)
    applied = callback.applied_to(found.model)
    same_on_all([(entry.paths, str(entry.target), entry.kernel_id) for entry in applied.report.fused])
    assert not applied.report.left_alone, applied.report
    assert all(calls.fused and not calls.original for calls in applied.calls()), applied.calls()
    assert applied.check_in_use(1) == []
    assert applied.lost == []
    before = sum(calls.fused for calls in applied.calls())
    applied.undo()
    assert not any("forward" in vars(module) for module in found.model.modules())
    with torch.no_grad():
        for its, mine in zip(held(want), held(found), strict=True):
            its.copy_(mine)
    assert torch.equal(logits(found), logits(want))
    assert sum(calls.fused for calls in applied.calls()) == before


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("trained"))
    return {case[1]: text for case, text in failures(check, [(folder, way) for way in WAYS]).items()}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_fused_before_it_is_wrapped_and_trains_as_unfused(failed, way):
    assert way not in failed, failed[way]
