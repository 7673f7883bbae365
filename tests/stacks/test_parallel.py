"""Models that transformers shards over two processes while loading: tensor and expert parallelism."""

import os
from unittest import mock

import pytest
import torch
import transformers
from support.ranks import failures, same_on_all
from support.states import differing, state_of
from support.tiny import build
from torch import distributed

from fuseplug import KernelManager
from fuseplug.patching import our_marks

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not distributed.is_available(), reason="this torch has no distributed"),
    pytest.mark.xdist_group("parallel"),  # all tests ask about one run
]

STACKED = transformers.__version__ >= "5"
"""Whether experts are stacked. In 4.57 experts are a list of MLPs, and tensor parallelism hooks their parts."""

KERNELS = ["inductor_fused_rmsnorm", "inductor_fused_swiglu", "inductor_fused_rope", "inductor_fused_moe"]


def loaded(folder, how):
    """A model that is sharded over two processes."""
    from transformers.distributed import DistributedConfig

    asked = {"tp_plan": "auto"}
    if STACKED:
        config = DistributedConfig(tp_size=2, tp_plan="auto", **({"ep_size": 2} if how == "expert" else {}))
        asked = {"distributed_config": config}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **asked).train()


def step(model):
    """The loss, and this rank's part of every gradient."""
    model.zero_grad()
    ids = torch.arange(24).view(2, 12) * 7 % 57 + 3
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return loss.detach(), {name: getattr(each, "_local_tensor", each).clone() for name, each in found.items()}


def fused_before(folder, how):
    """A model that is fused on meta, just before transformers wraps its layers, and the `Applied`."""
    share, found = transformers.PreTrainedModel.maybe_distribute_model, []

    def fuse_and_share(model, *args):
        found.append(KernelManager().apply_all(model, include=KERNELS, verify=False, device="cpu"))
        return share(model, *args)

    with mock.patch.object(transformers.PreTrainedModel, "maybe_distribute_model", fuse_and_share):
        model = loaded(folder, how)
    return model, *found


def check(folder, model_type, how, order):
    rank = str(distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}  # variables of torchrun, which 4.57 reads
    folder = f"{folder}/{model_type}"
    model = loaded(folder, how)
    want, before = step(model), state_of(model)
    if order == "before":
        model, applied = fused_before(folder, how)
    else:
        applied = KernelManager().apply_all(model, include=KERNELS, verify=False)
    same_on_all([(entry.paths, str(entry.target), entry.kernel_id, entry.why_not) for entry in applied.report.entries])
    mixture = "moe" in model_type
    mlp = {"moe"} if mixture and STACKED else {"swiglu"}
    assert {entry.op for entry in applied.report.fused} == {"rmsnorm", "rope"} | mlp, applied.report
    left_alone = {entry.why_not for entry in applied.report.left_alone if not entry.covered_by}
    assert len(left_alone) == (mixture and not STACKED), applied.report
    assert all("experts.*.down_proj is a plain Linear, without hooks" in why for why in left_alone)
    loss, gradients = step(model)
    torch.testing.assert_close(loss, want[0])
    torch.testing.assert_close(gradients, want[1], rtol=1e-3, atol=1e-5)
    assert all(calls.fused and not calls.original for calls in applied.calls()), applied.calls()
    assert applied.lost == []
    applied.undo()
    assert not any(our_marks(module) for module in model.modules())
    assert order == "before" or not differing(before, state_of(model))
    assert torch.equal(step(model)[0], want[0])


CASES = [("qwen3", "tensor", "after"), ("qwen3_moe", "tensor", "after")]
if STACKED:  # 4.57 wraps each layer while loading it
    CASES += [("qwen3_moe", "expert", "after")]
    CASES += [(*case, "before") for *case, _ in CASES]


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for model_type in {model_type for model_type, *_ in CASES}:
        build(model_type).save_pretrained(folder / model_type)
    found = failures(check, [(str(folder), *case) for case in CASES])
    return {case[1:]: text for case, text in found.items()}


@pytest.mark.parametrize(("model_type", "how", "order"), CASES)
def test_applied_before_and_after_it_is_shared_it_is_right_and_undone(failed, model_type, how, order):
    assert (model_type, how, order) not in failed, failed[model_type, how, order]
