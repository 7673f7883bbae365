"""Mixtures of experts under autocast: the kernel computes the calls, with the numbers of the original."""

import copy

import pytest
import torch
import transformers
from support.sparse import ROWS, build, entries, step
from support.thorough import first_quick, quick_if, thorough

from fuseplug import KernelManager
from fuseplug_moe.kernels import InductorMoEKernel
from fuseplug_moe.specimens import listed_blocks, stacked_experts

pytestmark = pytest.mark.usefixtures("checked_once", "small_checks")

HALVES = (torch.bfloat16, torch.float16)
FIVE = transformers.__version__ >= "5"
ORIGINAL = () if FIVE else ("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe")
"""Models whose experts, before transformers 5, get rows in float32 and weights in a half precision. Without autocast,
their own code raises for these dtypes. So there is nothing to check a kernel against, and the original computes the
calls.
"""


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": InductorMoEKernel.kernel_id, "FUSEPLUG_EVERY_SIZE": "1"})


@pytest.fixture
def qwen():
    return build(*next(row for row in ROWS if row[0] == "qwen3_moe")[:2])


def assert_close(found, unfused, exact):
    """*found* may differ from *unfused* as much as autocast moves *unfused* from *exact*, and by float32 roundings."""
    assert found.keys() == unfused.keys()
    for name, value in unfused.items():
        assert found[name].dtype == value.dtype, name
        moved, size = ((value.double() - other).norm() for other in (exact[name].double(), 0.0))
        assert (found[name].double() - value.double()).norm() <= moved + 2e-5 * size, name


def counted(applied):
    """The numbers of calls that kernels and originals computed."""
    return tuple(sum(getattr(calls, name) for calls in applied.calls()) for name in ("fused", "original"))


def number_fused(applied):
    return len([entry for entry in entries(applied.report) if entry.fused])


@pytest.mark.parametrize(
    ("model_type", "config", "variant"),
    quick_if([pytest.param(*row, id=row[0]) for row in ROWS], ("gpt_oss",)),
)
def test_every_call_is_the_kernels_and_numbers_are_the_originals(manager, model_type, config, variant):
    if model_type == "qwen3_vl_moe_text" and not FIVE:
        pytest.skip("there, its own code raises under autocast")
    model = build(model_type, config)
    exact = step(model)
    unfused = {dtype: step(model, dtype) for dtype in HALVES}
    applied = manager.apply_all(model)
    for number, dtype in enumerate(HALVES, 1):
        fused = step(model, dtype)
        calls = number * number_fused(applied)
        assert counted(applied) == ((0, calls) if model_type in ORIGINAL else (calls, 0)), applied.report
        assert_close(fused, unfused[dtype], exact)
    assert bool(number_fused(applied)) is bool(variant)


def outcome(module, *arguments):
    """The results, and the gradients of all arguments and parameters."""
    arguments = [each.detach().clone() for each in arguments]
    arguments = [each.requires_grad_(each.is_floating_point()) for each in arguments]
    module.zero_grad()
    result = module(*arguments)
    (result[0] if isinstance(result, tuple) else result).float().square().sum().backward()
    found = {f"result {at}": each for at, each in enumerate(result if isinstance(result, tuple) else [result])}
    found |= {f"argument {at}": each.grad for at, each in enumerate(arguments) if each.grad is not None}
    found |= {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return {name: value.detach().clone() for name, value in found.items()}


def filled(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module


@pytest.mark.parametrize("dtype", first_quick(HALVES), ids=str)
def test_experts_in_a_list_are_multiplied_in_the_dtype_of_autocast(manager, dtype):
    block = filled(listed_blocks.SparseBlock(4, 16, 24, 2))
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    exact = outcome(block, x)
    with torch.autocast("cpu", dtype):
        unfused = outcome(block, x)
    applied = manager.apply_all(block)
    with torch.autocast("cpu", dtype):
        fused = outcome(block, x)
    assert counted(applied) == (1, 0), applied.report
    assert_close(fused, unfused, exact)
    # The kernel must multiply in the narrow dtype, or experts would take longer than without Fuseplug.
    assert not torch.equal(fused["result 0"], outcome(block, x)["result 0"])


@pytest.mark.parametrize("routing", first_quick(HALVES), ids=str)
def test_gradients_have_the_dtypes_of_what_they_are_of(manager, routing):
    experts = filled(stacked_experts.StackedExperts(4, 16, 24))
    index = torch.rand(9, 4, generator=torch.Generator().manual_seed(1)).topk(2)[1]
    arguments = torch.randn(9, 16), index, torch.rand(9, 2).to(routing)
    plain = outcome(copy.deepcopy(experts), *arguments)
    applied = manager.apply_all(experts)
    found = outcome(experts, *arguments)
    assert counted(applied) == (1, 0), applied.report
    assert [found[f"argument {at}"].dtype for at in (0, 2)] == [torch.float32, routing]
    for name, value in plain.items():
        # The gradient of the routing weights is rounded once. Everything else is computed in float32.
        eps = 2e-5 if value.dtype is torch.float32 else torch.finfo(routing).eps
        torch.testing.assert_close(found[name], value, rtol=0, atol=eps * value.abs().max().item())


@thorough
class TestSurroundings:
    """It makes no difference where autocast begins and ends."""

    def test_it_may_be_on_while_the_kernels_are_applied(self, manager, qwen):
        with torch.autocast("cpu", torch.bfloat16):
            applied = manager.apply_all(qwen)
        step(qwen, torch.bfloat16)
        step(qwen)
        assert counted(applied) == (2 * number_fused(applied), 0)

    def test_it_may_be_off_around_the_experts_alone(self, manager):
        experts = filled(stacked_experts.StackedExperts(4, 16, 24))
        applied = manager.apply_all(experts)
        index = torch.rand(9, 4).topk(2)[1]
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            outcome(experts, torch.randn(9, 16), index, torch.rand(9, 2).bfloat16())
        assert counted(applied) == (1, 0)

    def test_nothing_may_want_a_gradient(self, manager, qwen):
        tokens = torch.arange(24).view(2, 12)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            unfused = qwen.eval()(input_ids=tokens).last_hidden_state
            applied = manager.apply_all(qwen)
            fused = qwen(input_ids=tokens).last_hidden_state
        assert counted(applied) == (number_fused(applied), 0)
        torch.testing.assert_close(fused, unfused, rtol=0, atol=0.02 * unfused.abs().max().item())

    def test_experts_may_be_frozen(self, manager, qwen):
        frozen = {name for name, _ in qwen.named_parameters() if ".experts." in name}
        for name, parameter in qwen.named_parameters():
            parameter.requires_grad_(name not in frozen)
        exact, unfused = step(qwen), step(qwen, torch.bfloat16)
        applied = manager.apply_all(qwen)
        fused = step(qwen, torch.bfloat16)
        assert counted(applied) == (number_fused(applied), 0)
        assert not frozen & fused.keys()
        assert_close(fused, unfused, exact)

    def test_the_forward_may_be_run_again_in_the_backward(self, manager, qwen):
        exact, unfused = step(qwen), step(qwen, torch.bfloat16)
        applied = manager.apply_all(qwen)
        qwen.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        fused = step(qwen, torch.bfloat16)
        assert counted(applied) == (number_fused(applied), 0)  # the forward stops within the experts when it runs again
        assert_close(fused, unfused, exact)

    def test_a_half_model_under_autocast_to_the_other_half_has_its_own_numbers(self, manager, qwen):
        qwen.bfloat16()
        unfused = step(qwen, torch.float16)
        applied = manager.apply_all(qwen)
        fused = step(qwen, torch.float16)
        assert counted(applied) == (0, number_fused(applied))
        assert all(torch.equal(fused[name], value) for name, value in unfused.items())


@thorough
def test_the_reason_names_the_dtype_that_came_and_what_was_checked(manager):
    experts = filled(stacked_experts.StackedExperts(4, 16, 24).bfloat16())
    applied = manager.apply_all(experts)
    arguments = torch.randn(9, 16).bfloat16(), torch.rand(9, 4).topk(2)[1], torch.rand(9, 2).half()
    (why,) = applied.try_(*arguments)[0].reasons
    assert why == (
        "it has a dtype in which the kernel was not checked here: top_k_weights in float16 (checked: bfloat16), "
        "beside hidden_states in bfloat16 and gate_up_proj in bfloat16"
    )
