"""The loss of a model in two processes: fused if the head's weight is whole, and right in any case."""

import pytest
import torch
from support.losses import Step, apply, assert_same, ids, in_question, language_model, told
from support.ranks import asked, failures, same_on_all
from support.thorough import quick_if
from torch import distributed, nn

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="this torch has no distributed"),
    pytest.mark.xdist_group("sharded losses"),  # all tests ask about one run
]


def data_parallel(**options):
    return lambda model: nn.parallel.DistributedDataParallel(model, **options)


def fully_sharded(*parts, **options):
    """Make each layer, each of *parts* and the rest a unit of its own."""

    def wrap(model):
        from torch.distributed.fsdp import fully_shard

        for layer in [*model.model.layers, *(model.get_submodule(part) for part in parts)]:
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    return wrap


def in_bfloat16(model):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fully_sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))(model)


def fsdp(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def parallel_head(model):
    """Give each process a part of the vocabulary, as transformers' tensor parallelism does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


FUSED, ORIGINAL, LEFT_ALONE = (2, {}, 0), (0, {}, 2), None
WRAPS = {
    "DistributedDataParallel": (data_parallel(), FUSED, FUSED),
    "fully_shard": (fully_sharded(), FUSED, FUSED),
    "fully_shard of the head": (fully_sharded("lm_head"), ORIGINAL, ORIGINAL),
    "a parallel head": (parallel_head, ORIGINAL, ORIGINAL),
    "DistributedDataParallel, unused parameters": (data_parallel(find_unused_parameters=True), FUSED, FUSED),
    "DistributedDataParallel, static": (data_parallel(static_graph=True), FUSED, FUSED),
    "fully_shard, resharded": (fully_sharded(reshard_after_forward=True), FUSED, FUSED),
    "fully_shard, in bfloat16": (in_bfloat16, FUSED, FUSED),
    "FSDP": (fsdp, FUSED, LEFT_ALONE),
}
"""How to wrap a model, and the calls of its head in two steps if it is fused before and after wrapping."""


def steps(model, name):
    """The losses of two steps, and this rank's part of every gradient.

    Each rank has its own data, unless the ranks share the work on the same data.
    """
    losses, last = [], None
    for number in range(2):
        model.zero_grad()
        tokens = ids(seed=10 * number + (0 if name == "a parallel head" else distributed.get_rank()))
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        losses.append(output.loss.detach())
        last = output
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return Step(torch.stack(losses), {name: local(each).clone() for name, each in found.items()}, last)


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def check(order, name):
    wrap, before, after = WRAPS[name]
    true = steps(wrap(language_model()), name)
    model = language_model()
    if order == "before":
        applied = apply(in_question(), model)
        model = wrap(model)
    else:
        model = wrap(model)
        applied = apply(in_question(), model)
    same_on_all([(entry.paths, str(entry.target), entry.why_not) for entry in applied.report.entries])
    wide = {"loss": 2e-2, "gradient": 5e-2} if "bfloat16" in name else {}
    assert_same(steps(model, name), true, **wide)
    calls = before if order == "before" else after
    if calls is LEFT_ALONE:
        assert not applied.report.fused, applied.report
    else:
        assert told(applied) == calls, applied.calls()
    applied.undo()
    assert_same(steps(model, name), true, loss=0, gradient=0)


@pytest.fixture(scope="module")
def failed(request):
    return failures(check, asked(request, "order", "name"))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", quick_if(WRAPS, [*WRAPS][:4]))
def test_losses_and_gradients_are_those_of_the_unfused_model(failed, order, name):
    assert (order, name) not in failed, failed[order, name]
