"""Experts are recognised by structure, told apart by what they compute, and left alone if any weights are missing."""

import copy

import pytest
import torch
from support.thorough import few_on, first_quick, quick_if
from torch import nn
from torch.nn import functional

from fuseplug import KernelManager
from fuseplug.contract import Rejection, Site
from fuseplug_moe import specimens
from fuseplug_moe.backends import inductor
from fuseplug_moe.kernels import InductorMoEKernel
from fuseplug_moe.recognise import example_rows as rows
from fuseplug_moe.recognise.small_copies import SmallCopies
from fuseplug_moe.recognise.structure import match
from fuseplug_moe.specimens import flat_weights, listed_blocks, routed_blocks, stacked_experts

pytestmark = pytest.mark.usefixtures("small_checks")

MADE = specimens.specimens()


@pytest.fixture(scope="module")
def manager():
    manager = KernelManager(environ={"FUSEPLUG_KERNELS": InductorMoEKernel.kernel_id})
    if not any(record.kernel for record in manager.kernels()):
        manager = KernelManager(environ={})  # the package runs from its sources
        manager.register(InductorMoEKernel)
    return manager


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module


def site(module):
    return Site("block", module, "cpu")


def why_not(manager, module):
    (entry,) = [entry for entry in manager.plan(module, verify=False).report.entries if entry.op == "moe"]
    assert not entry.fused
    return entry.why_not


def routed(module, tokens=9, experts=4, hidden=12):
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(tokens, hidden, generator=generator).requires_grad_(),
        torch.rand(tokens, experts, generator=generator).topk(2)[1],
        torch.rand(tokens, 2, generator=generator).requires_grad_(),
    )


@pytest.mark.parametrize("number", quick_if(range(len(MADE)), [0]), ids=lambda i: f"{i}-{type(MADE[i]).__name__}")
def test_every_specimen_is_fused(manager, number):
    report = manager.plan(MADE[number]).report
    assert [entry.check for entry in report.fused] == ["passed"], report


@pytest.mark.parametrize("inner", [6, 12])
def test_the_hidden_size_may_be_one_or_two_inner_ones(manager, inner):
    assert manager.plan(filled(routed_blocks.SortingBlock(5, 12, inner, top_k=2)), verify=False).report.fused


def test_the_way_of_one_token_is_checked_too(manager, monkeypatch):
    module = filled(stacked_experts.StackedExperts(4, 12, 7))
    (entry,) = manager.plan(module).report.entries
    assert entry.fused
    assert entry.gains_until == {} or set(entry.gains_until.values()) == {12}
    monkeypatch.setattr(inductor.one_token, "compute", lambda experts, x, *_: 2 * x)
    (entry,) = manager.plan(module).report.entries
    assert not entry.fused
    assert "its numbers are wrong for float32[1, 24] on cpu without gradients" in entry.why_not


# --- what looks like experts and is not


class SecondHalfGate(stacked_experts.StackedExperts):
    def _apply_gate(self, gate_up):
        up, gate = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def expert(self, x, expert):
        gate, up = self.project(x, expert).chunk(2, dim=-1)
        return self.project_back(functional.silu(gate) * up, expert)


class Unweighted(stacked_experts.StackedExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, torch.ones_like(top_k_weights))


class WeightsFirst(stacked_experts.StackedExperts):
    def expert(self, x, expert):
        return self.project_back(self._apply_gate(2.0 * self.project(x, expert)), expert)


class Residual(stacked_experts.StackedExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states + super().forward(hidden_states, top_k_index, top_k_weights)


class WeighedByProbability(listed_blocks.SparseBlock):
    def forward(self, hidden_states):
        y, logits = super().forward(hidden_states)
        return y * logits.softmax(-1).amax(-1).view(*y.shape[:-1], 1), logits


class SigmoidRouted(listed_blocks.SparseBlock):
    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        weights, index = logits.sigmoid().topk(self.top_k)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(index == number)
            y = y.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return y.view(hidden_states.shape), logits


@pytest.mark.parametrize(
    "module",
    [
        SecondHalfGate(4, 12, 7),
        Unweighted(4, 12, 7),
        WeightsFirst(4, 12, 7),
        Residual(4, 12, 7),
        WeighedByProbability(4, 12, 7, 2),
        SigmoidRouted(4, 12, 7, 2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_built_like_one_and_behaves_otherwise_is_left_alone(manager, module):
    assert "computes none of the known variants" in why_not(manager, filled(module))


@pytest.mark.parametrize(("renormalise", "variant"), [(True, "silu norm_topk_prob"), (False, "silu norm_topk_prob")])
def test_whether_weights_are_renormalised_is_read_at_each_call(manager, renormalise, variant):
    module = filled(listed_blocks.SparseBlock(4, 12, 7, 2, renormalise=renormalise))
    x = torch.randn(2, 6, 12)
    with manager.apply_all(module, verify=False) as applied:
        assert [entry.variant for entry in applied.report.fused] == [variant]
        module.norm_topk_prob = not renormalise
        found = module(x)[0]
    torch.testing.assert_close(found, module(x)[0], rtol=1e-4, atol=1e-5)


# --- rejections


def test_shapes_that_disagree_are_named(manager):
    module = stacked_experts.StackedExperts(4, 12, 7)
    module.down_proj = nn.Parameter(torch.zeros(4, 12, 8))
    assert "disagree: gate_up_proj is [4, 14, 12], down_proj is [4, 12, 8]" in why_not(manager, module)


def test_a_number_of_experts_that_is_not_held_is_named(manager):
    module = stacked_experts.StackedExperts(4, 12, 7)
    module.num_experts = 8
    assert "says num_experts=8, but gate_up_proj holds 4 experts" in why_not(manager, module)


def test_experts_that_are_shared_out_over_ranks_are_fused_with_those_of_this_rank(manager):
    module = filled(stacked_experts.StackedExperts(4, 12, 7))
    # As transformers leaves it: a DTensor holds all experts, and in the forward the module holds its own.
    module._is_expert_parallel, module.num_experts = True, 2
    assert manager.apply_all(module, verify=False).report.fused
    module.gate_up_proj = nn.Parameter(module.gate_up_proj[2:].detach().clone())
    module.down_proj = nn.Parameter(module.down_proj[2:].detach().clone())
    x, index, weights = routed(module)
    plain = copy.deepcopy(module)
    del plain.forward
    torch.testing.assert_close(module(x, index.clamp(max=2), weights), plain(x, index.clamp(max=2), weights))


def test_weights_that_are_no_floats_are_named():
    module = stacked_experts.StackedExperts(4, 12, 7).double()
    found = match(site(module))
    assert isinstance(found, Rejection)
    assert "torch.float64" in found.reason


def test_a_parameter_that_is_not_understood_is_named():
    module = stacked_experts.StackedExperts(4, 12, 7)
    module.scales = nn.Parameter(torch.ones(4, 3))
    found = match(site(module))
    assert isinstance(found, Rejection)
    assert "scales [4, 3]" in found.reason


def test_another_signature_is_named():
    class Presorted(stacked_experts.StackedExperts):
        def forward(self, hidden_states):
            return hidden_states

    found = match(site(Presorted(4, 12, 7)))
    assert isinstance(found, Rejection)
    assert "(self, hidden_states)" in found.reason


@pytest.mark.parametrize("kind", ["class", "bias", "shape"])
def test_experts_in_a_list_that_are_not_alike_are_named(kind):
    module = listed_blocks.SparseBlock(4, 12, 7, 2)
    if kind == "class":
        module.experts[2] = nn.Identity()
    else:
        module.experts[3].w2 = nn.Linear(7, 12, bias=True) if kind == "bias" else nn.Linear(8, 12, bias=False)
    found = match(site(module))
    assert isinstance(found, Rejection)
    expected = {
        "class": "Expert, Identity",
        "bias": r"experts.3.w2 has a bias",
        "shape": "experts.3.w2 must be [12, 7]",
    }
    assert expected[kind] in found.reason


class ThreeProjections(stacked_experts.StackedExperts):
    def __init__(self):
        super().__init__(4, 12, 7)
        self.up_proj = nn.Parameter(torch.empty(4, 7, 12))


class CallingList(nn.ModuleList):
    def forward(self, hidden_states, index, weights):
        return hidden_states


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (ThreeProjections(), "known are two"),
        (routed_blocks.ParallelLinear(4, 12, 7), "the module around it"),
        (flat_weights.FlatWeights(4, 12, 7), "the module around it"),
        (CallingList([listed_blocks.Expert(12, 7) for _ in range(2)]), "calls them itself"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_experts_that_are_not_known_are_answered(module, why):
    found = match(site(module))
    assert isinstance(found, Rejection)
    assert why in found.reason


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.empty(1, 1, 8))
        self.positions = nn.Parameter(torch.empty(1, 5, 8))

    def forward(self, x):
        return x


def test_tensors_of_three_dimensions_alone_are_no_experts():
    assert match(site(Embedded())) is None


@pytest.mark.parametrize(
    ("module", "child"),
    [
        (routed_blocks.SortingBlock(5, 12, 7, 2), "input_linear"),
        (routed_blocks.InputScalingBlock(5, 12, 7, 1), "experts"),
        (flat_weights.FlatExperts(4, 12, 7), "mlp"),
    ],
    ids=["sorted", "input-scaled", "flat"],
)
def test_what_is_no_longer_called_is_covered_and_called_again_once_hooked(manager, module, child):
    filled(module)
    generator = torch.Generator().manual_seed(3)
    arguments = [torch.randn(2, 5, 12, generator=generator)]
    if isinstance(module, flat_weights.FlatExperts):
        arguments += [torch.zeros(10, 4), torch.rand(10, 2), torch.rand(10, 4, generator=generator).topk(2)[1]]
    calls = []
    with manager.apply_all(module, verify=False) as applied:
        assert [e.covered_by for e in applied.report.entries if e.paths[0] == child] == ["the model"]
        module(*arguments)
        module.get_submodule(child).register_forward_pre_hook(lambda *_: calls.append(1))
        module(*arguments)
    assert calls


def test_an_expert_and_a_list_of_experts_are_no_mixture():
    assert match(site(listed_blocks.Expert(4, 4))) is None
    assert match(site(nn.ModuleList([listed_blocks.Expert(4, 4)] * 3))) is None


# --- afterwards


def compared(manager, module, call, change=lambda _: None):
    """Compare *call* on *module*, changed by *change*, unfused and fused: results and gradients."""
    plain = copy.deepcopy(module)
    change(plain)
    manager.apply_all(module, verify=False)
    change(module)
    results = []
    for each in (plain, module):
        y = call(each)
        y = y[0] if isinstance(y, tuple) else y
        wanted = [p for p in each.parameters() if p.requires_grad]
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)])
    for expected, found in zip(*results, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return module


def block():
    return filled(listed_blocks.SparseBlock(4, 12, 7, 2, shared=8, shared_gate=True))


X = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1))


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(module):
    torch.manual_seed(0)
    for expert in module.experts:
        expert.w1 = LowRank(expert.w1)


def test_an_adapter_added_after_applying_is_computed(manager):
    compared(manager, block(), lambda module: module(X), adapt)


def test_an_adapter_there_before_is_named(manager):
    module = block()
    adapt(module)
    # The adapter wraps a linear layer and states its sizes, as adapters do.
    for expert in module.experts:
        expert.w1.in_features, expert.w1.out_features = 12, 7
    assert "experts.0.w1 is" in why_not(manager, module)
    assert "apply before adapters" in why_not(manager, module)


@pytest.mark.parametrize("where", first_quick(["projection", "expert"]))
def test_a_hook_on_an_expert_is_called(manager, where):
    called = []

    def hook(module):
        target = module.experts[1] if where == "expert" else module.experts[1].w2
        target.register_forward_hook(lambda *_: called.append(where))

    compared(manager, block(), lambda module: module(X), hook)
    assert called == [where, where]


def hooked(module):
    module.experts[2].w2.register_forward_hook(lambda _m, _a, y: 2 * y)


def biased(module):
    module.experts[2].w1.bias = nn.Parameter(torch.ones_like(module.experts[2].w1.weight[:, 0]))


def low_ranked(module):
    module.experts[2].w3 = LowRank(module.experts[2].w3)


def with_another_activation(module):
    module.experts[2].act_fn = nn.Tanh()


def pruned(module):
    w1, w2, w3 = (module.experts[2]._modules[name] for name in ("w1", "w2", "w3"))
    w1.weight, w3.weight, w2.weight = (nn.Parameter(w) for w in (w1.weight[:5], w3.weight[:5], w2.weight[:, :5]))


class Quantised(nn.Parameter):
    """Stands for the tensors that quantizers put in the place of weights."""


def quantised(module):
    module.experts[2].w3.weight = Quantised(module.experts[2].w3.weight.detach())


CHANGES = [hooked, low_ranked, biased, with_another_activation, pruned, quantised]


@pytest.mark.parametrize("change", quick_if(CHANGES, [hooked, pruned]))
def test_one_expert_that_changes_later_brings_the_original_back(manager, change):
    module = filled(block())
    with manager.apply_all(module, verify=False) as applied:
        assert not applied.try_(X).not_reached
        change(module)
        (calls,) = applied.try_(X).not_reached
        found = calls, module(X)
    assert (found[0].fused, found[0].original) == (0, 1)
    expected = module(X)
    assert torch.equal(found[1][0], expected[0]) if isinstance(expected, tuple) else torch.equal(found[1], expected)


@pytest.mark.parametrize("change", first_quick([low_ranked, hooked, biased, with_another_activation]))
def test_one_expert_that_differs_from_the_first_is_a_reason_to_leave_the_block_alone(manager, change):
    module = filled(block())
    change(module)
    assert why_not(manager, module)


class ScaledExpert(listed_blocks.Expert):
    scale = 1.0

    def forward(self, x):
        return self.scale * super().forward(x)


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_expert_with_another_number_is_seen(manager, when):
    module = filled(block())
    for expert in module.experts:
        expert.__class__ = ScaledExpert
        expert.scale = 1.0
    if when == "before":
        module.experts[2].scale = 3.0
        assert why_not(manager, module)
        return
    with manager.apply_all(module, verify=False) as applied:
        assert not applied.try_(X).not_reached
        module.experts[2].scale = 3.0
        assert [calls.original for calls in applied.try_(X).not_reached] == [1]


def test_a_limit_that_is_made_learnable_gets_its_gradient(manager):
    def learnable(module):
        module.limit = nn.Parameter(torch.tensor(0.5))

    module = filled(stacked_experts.ClampedExperts(4, 12, 7))
    arguments = routed(module)
    compared(manager, module, lambda module: module(*arguments), learnable)


@pytest.mark.parametrize("shape", few_on("inductor", [(0, 5), (2, 0)]), ids=str)
def test_without_a_token_no_expert_has_a_gradient_as_before(manager, shape):
    def step(module):
        module.zero_grad(set_to_none=True)
        module(torch.empty(*shape, X.shape[-1]))[0].sum().backward()
        return [name for name, parameter in module.named_parameters() if parameter.grad is not None]

    module = block()
    before = step(module)
    with manager.apply_all(module, verify=False):
        assert step(module) == before


def test_hooks_on_the_router_and_the_shared_expert_are_called(manager):
    called = []
    module = block()
    manager.apply_all(module, verify=False)
    module.gate.register_forward_hook(lambda *_: called.append("router"))
    module.shared_expert.register_forward_hook(lambda *_: called.append("shared"))
    module(X)
    assert called == ["router", "shared"]


def test_the_experts_of_a_block_are_covered():
    (proposal,) = match(site(block()))
    assert proposal.covers == ("experts",)


def test_an_idle_expert_keeps_the_gradient_it_had(manager):
    for all_experts in (False, True):
        module = filled(listed_blocks.SparseBlock(6, 12, 7, 2, all_experts=all_experts))
        compared(manager, module, lambda module: module(X[:1, :1]))


def test_a_list_of_one_expert_is_fused_if_the_module_says_that_it_has_one(manager):
    module = compared(manager, filled(listed_blocks.SparseBlock(1, 12, 7, 1, shared=8)), lambda module: module(X))
    assert [entry.op for entry in manager.applied_to(module).report.fused] == ["moe"]
    del module.num_experts, module.top_k
    assert match(site(module)) is None


def test_jitter_is_the_original_s_in_training_and_absent_in_inference(manager):
    class Jittering(listed_blocks.SparseBlock):
        def forward(self, hidden_states):
            if self.training and self.jitter_noise > 0:
                hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(0.5, 1.5)
            return super().forward(hidden_states)

    module = Jittering(4, 12, 7, 2)
    module.jitter_noise = 0.1
    filled(module)
    manager.apply_all(module, verify=False)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(module(X)[0])
        manager.undo(module)
    assert torch.equal(*results)


def test_autocast_is_felt_by_listed_experts_as_before(manager):
    module = block()
    with torch.autocast("cpu", torch.bfloat16):
        before = module(X)[0]
        manager.apply_all(module, verify=False)
        assert torch.equal(module(X)[0], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_are_given_back_are_weighted_by_the_routing_weights_of_autocast(manager, dtype):
    module = filled(stacked_experts.PassingExperts(4, 12, 7, passing=2))
    x, index, weights = routed(module, experts=6)
    weights = weights.detach().to(dtype)
    index[0] = torch.tensor([4, 5])  # the sum of these two weights has more digits than one weight
    before = module(x, index, weights)
    with manager.apply_all(module, every_size=True) as applied:
        (calls,) = applied.try_(x, index, weights)
        torch.testing.assert_close(module(x, index, weights), before, rtol=1e-5, atol=1e-5)
    assert (calls.fused, calls.original) == (1, 0), calls


class TwoFaced(stacked_experts.EveryExpertInEval):
    """Computes something else in eval mode if no gradient is wanted."""

    def forward(self, hidden_states, router_indices, routing_weights):
        y = super().forward(hidden_states, router_indices, routing_weights)
        return y if self.training or torch.is_grad_enabled() else 2 * y


@pytest.mark.parametrize("training", [False, True])
def test_experts_that_compute_all_in_eval_are_left_to_it_where_gradients_are_wanted(manager, monkeypatch, training):
    module = filled(stacked_experts.EveryExpertInEval(4, 10, 6)).train(training)
    x, index = torch.randn(1, 6, 10), torch.tensor([[0, 1], [2, 1], [0, 2], [1, 0], [2, 0], [1, 2]])
    weights = torch.zeros(6, 4).scatter(1, index, torch.rand(6, 2)).requires_grad_()
    expected = module(x, index, weights)
    (gradient,) = torch.autograd.grad(expected.sum(), weights)
    (entry,) = manager.apply_all(module, verify=False).report.fused
    assert entry.kernel_id == "inductor_fused_moe"
    calls, compute = [], inductor._compute
    monkeypatch.setattr(inductor, "_compute", lambda *args: calls.append(args) or compute(*args))
    found = module(x, index, weights)
    (again,) = torch.autograd.grad(found.sum(), weights)
    assert len(calls) == training
    with torch.no_grad():
        without = module(x, index, weights)
    assert len(calls) == training + 1
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(without, expected)
    torch.testing.assert_close(again, gradient)


@pytest.mark.parametrize("training", [False, True])
def test_what_is_computed_without_gradients_must_be_the_same(manager, training):
    (entry,) = manager.plan(TwoFaced(4, 10, 6).train(training)).report.entries
    assert (entry.fused, entry.rejections[0][1].kind) == (False, "unlike")


def test_a_router_that_tells_no_rows_apart_is_an_error_and_not_a_wait():
    small = SmallCopies({}, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="gives hardly any random row"):
        rows.decided(small, torch.nn.Linear(1, 8, bias=False), 2, 16, torch.float32)
