"""`FuseplugCallback` in a Trainer with DeepSpeed, in two processes: ZeRO-2 and ZeRO-3."""

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
]

KERNELS = ["inductor_fused_rmsnorm", "inductor_fused_swiglu", "inductor_fused_rope"]


def trained(folder, stage, callbacks=()):
    from transformers import AutoModelForCausalLM

    deepspeed = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # By default ZeRO-3 keeps small parameters whole, and all parameters here are small.
        "zero_optimization": {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
    }
    model = AutoModelForCausalLM.from_pretrained(folder).train()  # with ZeRO-3, the model is split from here on
    trainer = trainer_of(f"{folder}/trained", model, rows(57), callbacks, deepspeed=deepspeed)
    trainer.train()
    return trainer


def check(folder, stage):
    from fuseplug_tools.integrations.transformers import FuseplugCallback

    rank = str(distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1"}
    os.environ["DS_ACCELERATOR"] = "cpu"
    callback = FuseplugCallback(manager=KernelManager(), include=KERNELS, verify=False)
    found = trained(folder, stage, [callback])
    # ZeRO-3 changes torch for the whole process, so the unfused training comes second.
    want = trained(folder, stage)
    assert type(found.model_wrapped).__name__ == type(want.model_wrapped).__name__ == "DeepSpeedEngine"
    assert all((each.numel() == 0) == (stage == 3) for each in found.model.parameters())
    torch.testing.assert_close(losses(found), losses(want), rtol=1e-3, atol=1e-4)

    applied = callback.applied_to(found.model)
    same_on_all([(entry.paths, str(entry.target), entry.kernel_id) for entry in applied.report.fused])
    assert not applied.report.left_alone, applied.report
    computed = {calls.kernel_id for calls in applied.calls() if calls.fused and not calls.original}
    idle = {each.kernel_id: each.why for each in applied.check_in_use()}
    if stage == 3:
        assert computed == {"inductor_fused_rmsnorm", "inductor_fused_rope"}
        assert idle.keys() == {"inductor_fused_swiglu"}
        assert "without hooks (there are some of deepspeed)" in idle["inductor_fused_swiglu"]
    else:
        assert (computed, idle) == (set(KERNELS), {})
    assert applied.lost == []
    applied.undo()
    assert not any("forward" in vars(module) for module in found.model.modules())


@pytest.mark.parametrize("stage", [2, 3])
def test_it_is_fused_before_deepspeed_has_it_and_trains_as_unfused(tmp_path, stage):
    pytest.importorskip("deepspeed")
    model = build("qwen3")
    model.config.pad_token_id = None  # transformers would zero its row of the embedding, which is empty under ZeRO-3
    model.save_pretrained(tmp_path)
    # Each case has its own processes, because ZeRO-3 changes torch.
    assert not failures(check, [(str(tmp_path), stage)])
