"""`Plan.explain`: what every kernel says of one module, even if the kernel has nothing to do with it."""

import pytest
from support.kernels import NormKernel, variant_of
from support.models import Toy

from fuseplug import KernelManager, PlanError

pytestmark = pytest.mark.usefixtures("examined_once")


@pytest.fixture
def plan():
    manager = KernelManager(environ={}, find=lambda environ, registered: list(registered))
    manager.register(NormKernel)
    manager.register(variant_of(NormKernel, "second_norm"))
    return manager.plan(Toy())


def norm_of(plan):
    return next(path for entry in plan.report.fused for path in entry.paths)


def test_the_winner_says_what_it_fuses_and_what_it_watches(plan):
    said = plan.explain(norm_of(plan))
    (entry,) = [entry for entry in plan.report.fused if norm_of(plan) in entry.paths]
    assert f"{entry.kernel_id}" in said
    assert f"fuses it: {entry.variant}; kernel check {entry.check}" in said
    assert all(f"watched at each call: {each}" in said for each in entry.watched)


def test_the_loser_says_who_is_preferred(plan):
    said = plan.explain(norm_of(plan))
    (winner,) = {entry.kernel_id for entry in plan.report.fused if norm_of(plan) in entry.paths}
    assert f"would fuse it too; {winner} is preferred" in said


def test_of_a_module_that_is_nobodys_business_each_says_so(plan):
    said = plan.explain("")
    assert said.startswith("the model (Toy)")
    assert said.count("does not have the kernel's op") == len(plan.report.records)


def test_a_path_that_is_not_there_is_an_error_that_names_what_is_near(plan):
    path = norm_of(plan)
    with pytest.raises(PlanError, match=f"no module at '{path}x' was planned.*near it: '{path}'"):
        plan.explain(f"{path}x")


def test_what_was_left_out_is_said_so():
    manager = KernelManager(environ={}, find=lambda environ, registered: list(registered))
    manager.register(NormKernel)
    model = Toy()
    path = norm_of(manager.plan(model))
    with pytest.raises(PlanError, match="left out by only= or skip="):
        manager.plan(model, skip=path).explain(path)
