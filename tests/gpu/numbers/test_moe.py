"""The mixture of experts in Triton: values and gradients against the reference in float64, what is launched, limits."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import EVERY_WAY, FEW, HALF, Scaled, arguments, assert_right, on, run, wide
from support.sparse import build
from support.thorough import first_quick
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fuseplug import KernelManager
from fuseplug_backends.triton import FORMULAS, Operation
from fuseplug_moe import reference, specimens
from fuseplug_moe.backends.triton import combine, gate_backward, gated, moe, project, routing, tiles, weight_gradient
from fuseplug_moe.kernels import TritonMoEKernel


def served(way):
    gate = reference.GATES.get(way.get("activation"))
    return gate is None or gate.row.formula in FORMULAS


WAYS = {
    name: way
    for name, way in EVERY_WAY.items()
    if name not in ("large", "no token", "transposed, many") and served(way)
}
WAYS["many experts"] = {"tokens": 9, "experts": 20, "k": 3}
FUSED = ["sort", "project_gated", "project", "combine"]
STEPS = ["sort", "project", "project"]
TINY = {"tokens": 3, "experts": 3}


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The operations that were launched, by name."""
    names = []

    def spied(name, launch):
        return lambda *arguments: (names.append(name), launch(*arguments))[1]

    for module in (combine, gate_backward, gated, project, routing, weight_gradient):
        for name, operation in vars(module).items():
            if isinstance(operation, Operation) and module.__name__ == operation.launch.__module__:
                monkeypatch.setattr(operation, "launch", spied(name, operation.launch))
    return names


def on_device(named, device, function=moe):
    """What *function* gives for *named* on the device: the result and every gradient, brought back."""
    upstream = torch.randn(named["x"].shape, generator=torch.Generator().manual_seed(9)).to(named["x"].dtype)
    return [None if each is None else each.cpu() for each in run(function, on(device, named), upstream.to(device))]


class TestValues:
    @pytest.mark.parametrize("way", WAYS)
    def test_are_the_reference_s_and_so_are_all_gradients(self, device, poisoned, launched, way):
        dtype = list(HALF)[sum(map(ord, way)) % len(HALF)]
        named = arguments(dtype=dtype, **TINY | WAYS[way])
        assert_right(on_device(named, device), named, dtype)
        called = callable(WAYS[way].get("activation")) or "post" in WAYS[way]
        assert launched[:3] == (STEPS if called else FUSED[:3])

    @pytest.mark.parametrize("dtype", HALF, ids=str)
    @pytest.mark.parametrize("way", FEW)
    def test_in_every_dtype(self, device, poisoned, way, dtype):
        named = arguments(dtype=dtype, **TINY | FEW[way])
        assert_right(on_device(named, device), named, dtype)

    @pytest.mark.parametrize(("dtype", "routing_dtype"), [(a, b) for a in HALF for b in HALF if a != b])
    def test_weights_may_have_a_dtype_of_their_own(self, device, dtype, routing_dtype):
        named = arguments(dtype=dtype, **TINY)
        named["top_k_weights"] = named["top_k_weights"].detach().to(routing_dtype).requires_grad_()
        named["top_k_index"] = named["top_k_index"].to(torch.int32)
        assert_right(on_device(named, device), named, max(dtype, routing_dtype, key=HALF.get))

    @pytest.mark.parametrize("way", ["stacked", "gate called"])
    def test_tokens_may_be_wider_than_the_experts(self, device, way):
        named = arguments(dtype=torch.bfloat16, **TINY | WAYS[way])
        named["x"] = named["x"].detach().float().requires_grad_()
        found = on_device(named, device)
        assert not torch.equal(found[0], found[0].bfloat16().float())
        assert_right(found, named, torch.bfloat16)

    @pytest.mark.parametrize("slots", [14, 17, 33, 65], ids="{} slots".format)
    def test_all_heights_of_tiles(self, device, poisoned, slots):
        named = arguments(tokens=slots, experts=1, k=1, hidden=5, inner=3)
        assert_right(on_device(named, device), named, torch.float32)

    @pytest.mark.parametrize("layout", ["concatenated", "interleaved", "ungated"])
    def test_several_tiles_across(self, device, poisoned, layout):
        named = arguments(hidden=70, inner=67, layout=layout, **TINY)
        assert_right(on_device(named, device), named, torch.float32)

    def test_up_may_be_apart_and_the_gate_biased(self, device, poisoned):
        named = arguments(layout="ungated", **TINY)
        named |= {"up": named["gate_up"].detach().flip(0).requires_grad_(), "layout": "concatenated"}
        assert_right(on_device(named, device), named, torch.float32)
        named["gate_up_bias"] = torch.randn(3, 6, generator=torch.manual_seed(0)).requires_grad_()
        assert_right(on_device(named, device), named, torch.float32)

    @pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
    def test_a_wide_tile_in_pieces(self, device, poisoned, layout):
        named = arguments(tokens=33, experts=1, k=1, hidden=4, inner=67, layout=layout, dtype=torch.bfloat16)
        assert_right(on_device(named, device), named, torch.bfloat16)

    def test_listed_several_tiles_across(self, device, poisoned):
        named = arguments(hidden=70, inner=67, dtype=torch.bfloat16, listed=True, **TINY)
        assert_right(on_device(named, device), named, torch.bfloat16)

    @pytest.mark.parametrize("way", ["stacked", "as in gpt-oss", "gate called"])
    def test_strided_inputs_are_as_good(self, device, launched, way):
        named = arguments(**TINY | WAYS[way])
        expected = on_device(named, device)
        named = on(device, named)
        named["x"] = named["x"].detach().repeat_interleave(2, 1)[:, ::2].requires_grad_()
        named["top_k_index"] = named["top_k_index"].t().contiguous().t()
        named["top_k_weights"] = named["top_k_weights"].detach().t().contiguous().t().requires_grad_()
        for name in ("gate_up", "down"):
            named[name] = named[name].detach().mT.contiguous().mT.requires_grad_()
        launched.clear()
        upstream = torch.randn(named["x"].shape, generator=torch.Generator().manual_seed(9)).to(device)
        found = run(moe, named, upstream.t().contiguous().t())
        assert set(launched) >= {"sort", "project", "combine"}
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)

    @pytest.mark.parametrize("way", FEW)
    def test_twice_they_are_the_same_and_so_they_are_without_gradients(self, device, way):
        named = on(device, arguments(dtype=torch.bfloat16, **TINY | FEW[way]))
        first, second = run(moe, named), run(moe, named)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
        with torch.no_grad():
            assert torch.equal(moe(**named), first[0])

    def test_arguments_stay_as_they_were(self, device):
        named = on(device, arguments(biased=True, **TINY))
        before = on(device, named)
        run(moe, named)
        assert all(torch.equal(named[name], before[name]) for name in named)

    @pytest.mark.parametrize("way", ["stacked", "gate called"])
    def test_autocast_changes_nothing(self, device, launched, way):
        named = on(device, arguments(**TINY | WAYS[way]))
        with torch.autocast(device, torch.bfloat16):
            inside = moe(**named)
        assert len(launched) == 4
        assert torch.equal(inside, moe(**named))


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_a_stack_whose_matrices_reach_further_than_32_bits_is_the_references(device, launched, name):
    named = arguments(dtype=torch.float16)
    experts, columns = named[name].shape[0], named[name].shape[-1]
    step = -(-(1 << 31) // (columns - 1))
    # The memory is reserved, and next to none of it touched.
    far = torch.empty(columns * step, dtype=torch.float16, device=device)
    far = far.as_strided(named[name].shape, (1, experts, step))
    far.copy_(named[name].detach())
    expected = reference.moe(**on(device, named))
    named[name] = far
    torch.testing.assert_close(moe(**on(device, named)), expected)
    assert not launched


class TestSort:
    @pytest.mark.parametrize(("slots", "experts"), [(1, 1), (30, 4), (300, 40), (5000, 3)])
    def test_is_stable_and_complete(self, device, poisoned, slots, experts):
        index = torch.randint(-1, experts + 2, (slots, 1), generator=torch.manual_seed(0))
        route = routing.sort(index.to(device), experts).cpu()
        chosen = index.flatten().masked_fill(index.flatten() < 0, experts).clamp(max=experts)
        assert route[:slots].tolist() == torch.argsort(chosen, stable=True).tolist()
        counts = torch.bincount(chosen, minlength=experts + 1)
        assert route[slots : slots + experts].tolist() == counts.cumsum(0)[:experts].tolist()
        assert routing.counts(route, index, experts).tolist() == counts[:experts].tolist()
        height = tiles.height(slots, experts)
        table = route[slots + experts :].view(-1, 3)[: tiles.tiles(slots, experts, height)]
        rows = [
            (row, expert) for expert, first, end in table.tolist() for row in range(first, min(end, first + height))
        ]
        assert rows == list(enumerate(chosen.sort()[0].tolist()))

    def test_a_negative_index_is_an_expert_elsewhere(self, device):
        named = on(device, arguments(**TINY))
        expected = moe(**named | {"top_k_index": named["top_k_index"].masked_fill(named["top_k_index"] == 1, 3)})
        found = moe(**named | {"top_k_index": named["top_k_index"].masked_fill(named["top_k_index"] == 1, -1)})
        assert torch.equal(found, expected)


class TestElsewhere:
    @pytest.mark.parametrize("elsewhere", [5, 14], ids=["some", "all"])
    @pytest.mark.parametrize("way", FEW)
    def test_experts_add_nothing_to_results_and_gradients(self, device, poisoned, way, elsewhere):
        named = arguments(**FEW[way])
        named["top_k_index"].view(-1)[torch.randperm(14, generator=torch.manual_seed(0))[:elsewhere]] = 5
        assert_right(on_device(named, device), named, torch.float32)

    @pytest.mark.parametrize("where", ["post", "activation"])
    def test_experts_add_nothing_to_the_gradients_of_a_function_of_rows(self, device, poisoned, where):
        named = arguments(**TINY)
        named["top_k_index"].view(-1)[:4] = 9
        named["top_k_weights"].detach().view(-1)[:4] = float("inf")
        function = Scaled(12 if where == "post" else 6)
        (expected,) = torch.autograd.grad(reference.moe(**named, **{where: function}).sum(), function.weight)
        function.to(device)
        (found,) = torch.autograd.grad(moe(**on(device, named), **{where: function}).sum(), function.weight)
        torch.testing.assert_close(found.cpu(), expected)

    @pytest.mark.parametrize("way", ["stacked", "gate called"])
    def test_experts_add_nothing_even_with_an_infinite_weight(self, device, way):
        named = on(device, arguments(**TINY | WAYS[way]))
        named["top_k_index"][2, 0] = 2**40
        expected = run(moe, named)
        named["top_k_weights"].detach()[2, 0] = float("inf")
        assert all(torch.equal(one, other) for one, other in zip(run(moe, named), expected, strict=True))


class TestIdle:
    @pytest.mark.parametrize("way", [{}, {"activation": EVERY_WAY["listed, own"]["activation"]}], ids=["silu", "own"])
    @pytest.mark.parametrize("idle", ["zero", "none"])
    def test_listed_experts_without_tokens_have_the_gradient_asked_for(self, device, idle, way):
        named = arguments(tokens=2, experts=6, listed=True, idle=idle, **way)
        found = on_device(named, device)
        hit = set(named["top_k_index"].flatten().tolist())
        assert sum(each is None for each in found) == (0 if idle == "zero" else 3 * (6 - len(hit)))
        assert_right(found, named, torch.float32)

    @pytest.mark.parametrize("way", [{}, {"activation": EVERY_WAY["listed, own"]["activation"]}], ids=["silu", "own"])
    def test_so_they_have_in_a_second_derivative(self, device, way):
        named = on(device, arguments(tokens=2, experts=6, listed=True, idle="none", **way))
        tensors = [named["x"], *named["gate_up"], *named["up"], *named["down"]]
        found = torch.autograd.grad(moe(**named).square().sum(), tensors, create_graph=True, allow_unused=True)
        expected = torch.autograd.grad(reference.moe(**named).square().sum(), tensors, allow_unused=True)
        assert [each is None for each in found] == [each is None for each in expected]

    def test_stacked_experts_without_tokens_have_gradients_of_zeros(self, device, poisoned):
        named = arguments(tokens=1, experts=5, biased=True)
        (hit,) = named["top_k_index"].tolist()
        for gradient in on_device(named, device)[3:]:
            assert [bool(each.any()) for each in gradient] == [expert in hit for expert in range(5)]


class Waiting(TorchDispatchMode):
    """Notes each operation by which the host would be told what the device computed."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "bincount", "equal", "is_nonzero", "_to_copy"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class TestLaunches:
    @pytest.mark.parametrize("way", FEW)
    def test_the_host_waits_for_nothing(self, device, way):
        named = on(device, arguments(**TINY | FEW[way]))
        with Waiting() as waiting:
            run(moe, named, torch.ones_like(named["x"]))
        assert waiting.found == []

    def test_it_would_be_noticed(self):
        with Waiting() as waiting:
            torch.ones(3).sum().item()
        assert waiting.found

    def test_each_gradient_is_computed_if_it_is_wanted(self, device, launched):
        named = on(device, arguments(biased=True, **TINY))
        kept = {
            "x": ["gate_backward", "project", "combine"],
            "top_k_weights": ["gate_backward"],
            "gate_up": ["gate_backward", "weight_gradient"],
            "down": ["gate_backward", "weight_gradient"],
            "gate_up_bias": ["gate_backward", "bias_gradient"],
            "down_bias": ["bias_gradient"],
        }
        for wanted, expected in kept.items():
            alone = {
                name: value if name in (wanted, "top_k_index") else value.detach() for name, value in named.items()
            }
            result = moe(**alone)
            launched.clear()
            torch.autograd.grad(result.sum(), named[wanted])
            assert launched == expected

    @pytest.mark.parametrize("frozen", ["x", "top_k_weights", "gate_up", "down"])
    def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(self, device, frozen):
        named = arguments(**TINY)
        full = dict(zip(("x", "top_k_weights", "gate_up", "down"), on_device(named, device)[1:], strict=True))
        named[frozen] = named[frozen].detach()
        del full[frozen]
        found = on_device(named, device)[1:]
        assert all(torch.equal(one, other) for one, other in zip(found, full.values(), strict=True))

    def test_less_is_kept_for_the_backward_than_by_the_original(self, device):
        tokens, k, hidden, inner = 12, 2, 16, 8
        named = on(device, arguments(tokens=tokens, k=k, hidden=hidden, inner=inner, dtype=torch.bfloat16))
        own = {t.untyped_storage().data_ptr() for t in named.values()}
        found = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and tensor.is_floating_point():
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = moe(**named)
        del result
        assert sum(found.values()) == tokens * k * 2 * inner * 2


BEYOND = {
    "float64": wide(arguments()),
    "weights in float64": arguments() | {"top_k_weights": torch.rand(7, 2, dtype=torch.float64)},
    "no token": arguments(tokens=0),
    "down of another dtype": arguments() | {"down": torch.rand(5, 12, 6, dtype=torch.bfloat16)},
    "bias of another dtype": arguments(biased=True) | {"down_bias": torch.rand(5, 12, dtype=torch.float64)},
}


class TestLimits:
    @pytest.mark.parametrize("call", BEYOND)
    def test_beyond_them_it_is_the_reference(self, device, launched, call):
        named = on(device, BEYOND[call])
        with torch.no_grad():
            assert torch.equal(moe(**named), reference.moe(**named))
        assert not launched

    def test_listed_matrices_that_are_strided_are_the_reference_s(self, device, launched):
        named = on(device, arguments(listed=True, **TINY))
        named["down"] = [matrix.detach().mT.contiguous().mT for matrix in named["down"]]
        with torch.no_grad():
            assert torch.equal(moe(**named), reference.moe(**named))
        assert not launched

    def test_a_list_beside_a_stack_is_the_reference_s(self, device, launched):
        named = on(device, arguments(listed=True, **TINY))
        named["up"] = torch.stack(named["up"]).detach()
        with torch.no_grad():
            assert torch.equal(moe(**named), reference.moe(**named))
        assert not launched

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"activation": "tanh"}, "unknown activation 'tanh'"),
            ({"layout": "stacked"}, "layout must be"),
            ({"activation": "silu-clamp-before"}, "give it a limit"),
            ({"down": torch.rand(5, 12, 7)}, "gate_up must be"),
            ({"top_k_index": torch.rand(7, 2)}, "top_k_index must be integers"),
        ],
    )
    def test_wrong_arguments_are_named_as_by_the_reference(self, device, change, error):
        with pytest.raises((TypeError, ValueError), match=error):
            moe(**on(device, arguments() | change))


class TestTracers:
    @pytest.mark.parametrize("way", ["stacked", "as in gpt-oss", "listed", "gate called"])
    def test_compiled_it_is_one_graph_and_right(self, device, launched, way):
        torch.compiler.reset()
        named = arguments(**TINY | WAYS[way])
        found = on_device(named, device, torch.compile(moe, fullgraph=True, backend="aot_eager"))
        assert "sort" in launched
        assert_right(found, named, torch.float32)

    def test_a_compiled_graph_serves_other_numbers_of_tokens(self, device, launched):
        torch.compiler.reset()
        compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
        named = on(device, arguments(tokens=4, experts=3))
        compiled(**named)
        with torch.compiler.set_stance("fail_on_recompile"):
            other = on(device, arguments(tokens=9, experts=3))
            other |= {name: named[name] for name in ("gate_up", "down")}
            torch.testing.assert_close(compiled(**other), moe(**other))

    def test_it_exports(self, device, launched):
        class Module(torch.nn.Module):
            def forward(self, x, index, weights, gate_up, down):
                return moe(x, index, weights, gate_up, down)

        named = on(device, arguments(**TINY))
        values = tuple(value.detach() for value in named.values())
        program = torch.export.export(Module(), values)
        assert "fuseplug_moe.project_gated.default" in str(program.graph)
        assert torch.equal(program.module()(*values), moe(*values))

    @pytest.mark.parametrize("way", FEW)
    def test_fake_tensors_are_not_read(self, device, way):
        named = on(device, arguments(dtype=torch.bfloat16, **TINY | FEW[way]))
        with FakeTensorMode() as mode:
            fake = {
                name: [mode.from_tensor(each) for each in value]
                if isinstance(value, list)
                else mode.from_tensor(value)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in named.items()
            }
            found = run(moe, fake, torch.empty_like(fake["x"]))
        tensors = [
            t for v in named.values() for t in (v if isinstance(v, list) else [v]) if isinstance(t, torch.Tensor)
        ]
        expected = [named["x"], *(t for t in tensors if t.requires_grad)]
        assert [(one.shape, one.dtype) for one in found] == [(other.shape, other.dtype) for other in expected]

    def test_functorch_sees_the_formula(self, device, launched):
        named = on(device, arguments(**TINY))
        fixed = {name: value for name, value in named.items() if name != "x"}
        gradient = torch.func.grad(lambda x: moe(x, **fixed).sum())(named["x"].detach())
        assert not launched
        torch.testing.assert_close(gradient, run(reference.moe, named, torch.ones_like(named["x"]))[1])

    def test_the_operations_pass_the_checks_of_torch(self, device):
        named = {name: value.detach() for name, value in on(device, arguments(**TINY)).items()}
        x, index, weights, gate_up, down = named.values()
        route = routing.sort(index, 3)
        gate = ("concatenated", "silu", 0.0, 1.0)
        inner, before = gated.project_gated(x, route, [gate_up], [], None, 3, False, 2, *gate, True)
        calls = {
            routing.sort: (index, 3),
            gated.project_gated: (x, route, [gate_up], [], None, 3, False, 2, *gate, True),
            project.project: (inner, route, [down], [], None, 3, False, 0, True, True),
            gate_backward.gate_backward: (x, before, weights, index, route, [down], None, 3, False, *gate),
            weight_gradient.weight_gradient: (before, x, route, 6, 3, 0, 2),
            weight_gradient.bias_gradient: (x, weights, route, 6, 3, 2),
            combine.combine: (before, index, weights, 3, torch.float32),
            combine.combine_backward: (x, x[:1].expand(6, -1).contiguous(), index, weights, 3),
        }
        for operation, arguments_ in calls.items():
            torch.library.opcheck(operation.op, arguments_, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("way", ["stacked", "as in gpt-oss", "listed", "gate called", "post"])
def test_second_derivatives_are_the_formula_s(device, way):
    named = on(device, arguments(tokens=2, hidden=4, inner=3, experts=2, **WAYS[way]))
    tensors = [t for v in named.values() for t in (v if isinstance(v, list) else [v]) if isinstance(t, torch.Tensor)]
    wanted = [t for t in tensors if t.requires_grad]

    def second(function):
        first = torch.autograd.grad(function(**named).square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), wanted)

    for found, expected in zip(second(moe), second(reference.moe), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": TritonMoEKernel.kernel_id})


MODULES = {type(module).__name__: module for module in specimens.specimens()}


@pytest.mark.parametrize("name", first_quick(["StackedExperts", "InterleavedExperts", "SparseBlock"], 2))
def test_a_module_computes_the_same_and_comes_back(device, manager, launched, name, monkeypatch):
    monkeypatch.setattr(TritonMoEKernel, "check_sizes", (1 << 7,))
    module = MODULES[name].to(device)
    hidden = next(module.parameters()).shape[-1 if name != "InterleavedExperts" else 1]
    x = torch.randn(1, 5, hidden, generator=torch.manual_seed(0)).to(device)
    inputs = (
        (x,) if name == "SparseBlock" else (x[0], torch.tensor([[0, 1]] * 5).to(device), torch.rand(5, 2).to(device))
    )
    before = module(*inputs)
    applied = manager.apply_all(module)
    (entry,) = applied.report.fused
    assert (entry.kernel_id, entry.check) == (TritonMoEKernel.kernel_id, "passed")
    launched.clear()
    torch.testing.assert_close(module(*inputs), before, rtol=1e-4, atol=1e-5)
    assert launched == FUSED
    applied.undo()
    assert all(
        map(torch.equal, *((each if isinstance(each, tuple) else (each,)) for each in (module(*inputs), before)))
    )


@pytest.mark.parametrize(("model_type", "config"), first_quick([("gpt_oss", {"head_dim": 8}), ("mixtral", {})]))
def test_a_model_of_transformers_computes_the_same(device, manager, launched, model_type, config, monkeypatch):
    monkeypatch.setattr(TritonMoEKernel, "check_sizes", (1 << 7,))
    model = build(model_type, config | {"num_hidden_layers": 1}).to(device)
    tokens = torch.arange(1, 6)[None].to(device)
    before = model(tokens).last_hidden_state
    applied = manager.apply_all(model)
    assert {entry.check for entry in applied.report.fused} == {"passed"}
    launched.clear()
    torch.testing.assert_close(model(tokens).last_hidden_state, before, rtol=1e-4, atol=1e-5)
    assert launched == FUSED
