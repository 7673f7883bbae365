"""Whole mixture-of-experts models of transformers compute the same fused as before."""

import copy

import pytest
import torch
from support.sparse import FIVE, ROWS, build, entries, step
from support.thorough import covering, first_quick, thorough

from fuseplug import KernelManager
from fuseplug_moe.kernels import InductorMoEKernel


@pytest.fixture(scope="module")
def manager():
    manager = KernelManager(environ={"FUSEPLUG_KERNELS": InductorMoEKernel.kernel_id})
    if not any(record.kernel for record in manager.kernels()):
        manager = KernelManager(environ={})  # the kernel is not installed, and runs from its sources
        manager.register(InductorMoEKernel)
    return manager


def misrouted(implementation, number, *, parallel):
    """Six experts, and the arguments of a call that sends every second row to expert *number*."""
    experts = build("mixtral", {}).layers[0].mlp.experts
    experts.config._experts_implementation = implementation
    experts._is_expert_parallel = parallel
    index = torch.rand(7, 6).topk(2)[1]
    index[::2, 0] = number
    return experts, (torch.randn(7, 32), index, torch.rand(7, 2).masked_fill(index == 6, 0.0))


def outcome(experts, arguments):
    """The result of the call, or the name of the error that it raises."""
    try:
        return experts(*arguments)
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize(("model_type", "config", "variant"), first_quick(ROWS), ids=[row[0] for row in ROWS])
def test_a_model_computes_the_same_and_comes_back(manager, model_type, config, variant):
    model = build(model_type, config)
    before = step(model)

    applied = manager.apply_all(model)

    found = {entry.variant for entry in entries(applied.report) if entry.fused}
    assert found == ({variant} if variant else set()), applied.report
    assert all(entry.why_not for entry in entries(applied.report) if not entry.fused and not entry.covered_by)
    fused = step(model)
    assert fused.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-3, atol=1e-6 + 2e-5 * value.abs().max().item(), msg=name)
    applied.undo()
    after = step(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.skipif(not FIVE, reason="the implementation of experts is chosen since transformers 5")
class TestImplementations:
    @thorough
    @pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
    def test_each_is_found_to_be_the_same(self, manager, implementation):
        model = build("mixtral", {})
        model.set_experts_implementation(implementation)
        before = step(model)
        with manager.apply_all(model) as applied:
            assert {entry.variant for entry in entries(applied.report)} == {"silu"}
            fused = step(model)
        for name, value in before.items():
            torch.testing.assert_close(fused[name], value, rtol=1e-3, atol=1e-6 + 2e-5 * value.abs().max().item())

    def test_setting_one_after_applying_changes_nothing_and_undo_brings_it(self, manager):
        model = build("mixtral", {})
        applied = manager.apply_all(model, verify=False)
        fused = step(model)["output"]
        model.set_experts_implementation("eager")
        assert torch.equal(step(model)["output"], fused)
        applied.undo()
        eager = build("mixtral", {})
        eager.set_experts_implementation("eager")
        assert torch.equal(step(model)["output"], step(eager)["output"])

    @pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
    def test_an_expert_of_another_rank_adds_nothing(self, manager, implementation):
        experts, arguments = misrouted(implementation, number=6, parallel=True)
        plain = copy.deepcopy(experts)
        applied = manager.apply_all(experts, verify=False)
        torch.testing.assert_close(experts(*arguments), plain(*arguments), rtol=1e-4, atol=1e-5)
        assert [(calls.fused, calls.original) for calls in applied.calls()] == [(1, 0)]

    @pytest.mark.parametrize(
        ("implementation", "number", "parallel"),
        covering(
            (implementation, *wrong)
            for implementation in ("eager", "grouped_mm", "batched_mm")
            for wrong in [(6, False), (9, False), (9, True), (-1, False), (-1, True)]
        ),
    )
    def test_an_index_that_names_no_expert_is_the_originals(self, manager, implementation, number, parallel):
        experts, arguments = misrouted(implementation, number, parallel=parallel)
        want = outcome(copy.deepcopy(experts), arguments)
        assert manager.apply_all(experts, verify=False).report.fused
        found = outcome(experts, arguments)
        if isinstance(want, str) or isinstance(found, str):
            assert found == want
        elif implementation != "grouped_mm":  # grouped_mm leaves such rows unwritten
            assert torch.equal(found, want)

    def test_the_experts_may_be_shared_out_afterwards(self, manager):
        experts, (x, index, weights) = misrouted("eager", number=0, parallel=False)
        arguments = x, index.clamp(max=3), weights.masked_fill(index >= 3, 0)
        plain = copy.deepcopy(experts)
        applied = manager.apply_all(experts, verify=False)
        for each in (plain, experts):
            each._is_expert_parallel, each.num_experts = True, 3
            for name in ("gate_up_proj", "down_proj"):
                setattr(each, name, torch.nn.Parameter(getattr(each, name)[:3].detach().clone()))
        assert not applied.try_(*arguments).not_reached
        torch.testing.assert_close(experts(*arguments), plain(*arguments), rtol=1e-4, atol=1e-5)

    @thorough
    def test_it_compiles_to_one_graph_as_before(self, manager):
        experts = build("mixtral", {}).layers[0].mlp.experts
        arguments = torch.randn(7, 32), torch.rand(7, 6).topk(2)[1], torch.rand(7, 2)
        expected = experts(*arguments)
        manager.apply_all(experts, verify=False)
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*arguments), expected, rtol=1e-4, atol=1e-5)


@thorough
def test_adapters_of_peft_are_computed_whether_added_before_or_after(manager):
    peft = pytest.importorskip("peft")
    names = "gate_proj|up_proj|down_proj|q_proj"
    config = peft.LoraConfig(r=2, target_modules=rf".*\.({names})", init_lora_weights=False)
    model = build("qwen2_moe", {"shared_expert_intermediate_size": 16})
    manager.apply_all(model)
    torch.manual_seed(1)
    after = peft.get_peft_model(model, config)
    plain = build("qwen2_moe", {"shared_expert_intermediate_size": 16})
    torch.manual_seed(1)
    plain = peft.get_peft_model(plain, config)
    expected = step(plain)
    for name, value in step(after).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5 + 1e-4 * value.abs().max().item())
    report = manager.apply_all(plain).report
    fused = {entry.fused for entry in entries(report)}
    assert fused == ({True} if FIVE else {False}), report
