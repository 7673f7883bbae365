"""Models on two processes: both forms of FSDP, and data-parallel copies, wrapped before fusing and after."""

import itertools

import pytest
import torch
from support import kernels
from support.managers import manager_of
from support.models import MLP, Block, Norm, Toy, inputs
from support.ranks import asked, failures, same_on_all
from support.states import differing, state_of
from support.thorough import covering
from torch import distributed, nn

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="this torch has no distributed"),
    pytest.mark.xdist_group("sharded"),  # one run of the two ranks answers all tests
]


def manager():
    return manager_of(kernels.NormKernel, kernels.RotaryKernel)


def fsdp(use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def wrap(model):
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )

    return wrap


def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


WRAPS = {
    "FSDP, parameters kept": fsdp(use_orig_params=True),
    "FSDP, parameters flat": fsdp(use_orig_params=False),
    "fully_shard": fully_sharded,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
}


def step(model):
    """The loss for this rank's own data, and this rank's part of every gradient."""
    model.zero_grad()
    loss = model(inputs(seed=distributed.get_rank())).square().mean()
    loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return loss.detach(), [getattr(each, "_local_tensor", each).clone() for each in found]


def told(report):
    return [(entry.paths, str(entry.target), entry.kernel_id, entry.why_not) for entry in report.entries]


def runs(model, want, norms, rotaries):
    kernels.ran.clear()
    torch.testing.assert_close(step(model), want)
    assert (kernels.ran["norm"], kernels.ran["rotary"]) == (norms, rotaries)


def fused_before(wrap):
    fusing, model = manager(), Toy()
    want = step(WRAPS[wrap](Toy()))
    applied = fusing.apply_all(model)
    assert len(applied.report.fused) == 7
    wrapped = WRAPS[wrap](model)
    runs(wrapped, want, 5, 2)
    # A second call changes nothing, whatever it can see of the wrapped model.
    fusing.apply_all(wrapped)
    assert applied.lost == []
    runs(wrapped, want, 5, 2)
    applied.undo()
    assert not any("forward" in vars(module) for module in model.modules())
    runs(wrapped, want, 0, 0)


def fused_after(wrap):
    fusing, model = manager(), WRAPS[wrap](Toy())
    want = step(WRAPS[wrap](Toy()))
    for _ in range(2):  # before the first run, and after it, when the modules hold other things
        before = state_of(model)
        applied = fusing.apply_all(model)
        same_on_all(told(applied.report))
        if wrap.startswith("FSDP"):
            assert not applied.report.fused
            # A row for each unit: the two blocks, and the rest.
            assert len(applied.report.entries) == 3
            assert all("apply before wrapping in FSDP" in entry.why_not for entry in applied.report.entries)
            assert not differing(before, state_of(model))
            runs(model, want, 0, 0)
        else:
            assert len(applied.report.fused) == 7
            fusing.undo(model)
            assert not differing(before, state_of(model))
            applied = fusing.apply_all(model)
            runs(model, want, 5, 2)
        assert applied.lost == []
        applied.undo()
        runs(model, want, 0, 0)


class Mixed(nn.Module):
    """A norm that FSDP flattens, a norm that it is told to ignore, and an MLP without parameters of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.flat, self.ignored, self.mlp = Norm(), Norm(), MLP()

    def forward(self, x):
        return self.ignored(self.mlp(self.flat(x)))


def ignoring(_wrap):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = Mixed()
    ignored = model.ignored
    model = FullyShardedDataParallel(model, ignored_modules=[ignored], device_id=torch.device("cpu"))
    want = step(model)
    fusing = manager()
    applied = fusing.apply_all(model)
    assert ["ignored" in entry.paths[0] for entry in applied.report.fused] == [True]
    same_on_all(told(applied.report))
    kernels.ran.clear()
    torch.testing.assert_close(step(model), want)
    assert kernels.ran["norm"] == 1
    only = fusing.plan(model, only="*.flat").report
    assert [entry.paths for entry in only.entries] == [("",)]
    assert not fusing.plan(model, only="*.ignored", skip="*.flat").report.left_alone


ORDERS = {"before": fused_before, "after": fused_after, "partly": ignoring}
CASES = [("partly", "FSDP"), *itertools.product(("after", "before"), WRAPS)]


def check(order, wrap):
    ORDERS[order](wrap)


@pytest.fixture(scope="module")
def failed(request):
    return failures(check, asked(request, "order", "wrap"))


def test_one_process_asks_everything(request):
    if hasattr(request.config, "workerinput"):
        assert request.node.nodeid.endswith("@sharded"), "this pytest-xdist does not keep groups together"


@pytest.mark.parametrize(("order", "wrap"), covering(CASES))
def test_it_is_right_or_left_alone_on_all_ranks_with_the_order_that_works_and_undone(failed, order, wrap):
    assert (order, wrap) not in failed, failed[order, wrap]
