"""What is specific to the mixture of experts in Triton: tiles, sorting, launches, and what is kept and waited for."""

import pytest
import torch
from support.mixtures import FEW, TINY, arguments, assert_right, on, on_device, run
from support.thorough import few_on
from torch.utils._python_dispatch import TorchDispatchMode

from fuseplug_moe import reference
from fuseplug_moe.backends.triton import combine, gate_backward, gated, moe, project, routing, tiles, weight_gradient

FUSED = ["sort", "project_gated", "project", "combine"]
STEPS = ["sort", "project", "project"]


@pytest.fixture(autouse=True)
def launched(backend):
    """The names of the operations that were launched."""
    backend.module("moe")
    return backend.order


@pytest.fixture
def device(backend):
    return backend.device


@pytest.mark.parametrize("slots", few_on("triton", [33, 14, 17, 65]), ids="{} slots".format)
def test_all_heights_of_tiles(device, slots):
    named = arguments(tokens=slots, experts=1, k=1, hidden=5, inner=3)
    assert_right(on_device(moe, named, device), named, torch.float32)


@pytest.mark.parametrize(
    "options",
    few_on(
        "triton",
        [
            {"tokens": 33, "experts": 1, "k": 1, "hidden": 4, "inner": 67, "layout": "interleaved"},
            {"hidden": 70, "inner": 67, "listed": True},
            {"hidden": 70, "inner": 67, "layout": "concatenated"},
            {"hidden": 70, "inner": 67, "layout": "interleaved"},
            {"hidden": 70, "inner": 67, "layout": "ungated"},
            {"tokens": 33, "experts": 1, "k": 1, "hidden": 4, "inner": 67, "layout": "concatenated"},
        ],
        2,
    ),
    ids=str,
)
def test_several_tiles_across_and_a_wide_one_in_pieces(device, options):
    named = arguments(**TINY | options, dtype=torch.bfloat16)
    assert_right(on_device(moe, named, device), named, torch.bfloat16)


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_a_stack_whose_matrices_reach_further_than_32_bits_is_the_references(device, launched, monkeypatch, name):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    named = arguments(dtype=torch.float16)
    experts, columns = named[name].shape[0], named[name].shape[-1]
    step = -(-(1 << 31) // (columns - 1))
    # The memory is reserved, but almost none of it is touched.
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


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped matmul")
@pytest.mark.parametrize(("left_k", "right_k"), [(0, 2), (2, 0)])
def test_torch_s_grouped_matmul_gives_the_same_gradients_of_matrices(device, monkeypatch, left_k, right_k):
    index = torch.tensor([[4, 1], [1, 3], [4, 5], [1, 4]], device=device)  # of experts 0 to 4; 0 and 2 are idle
    route = routing.sort(index, 5)
    left = torch.randn(4 if left_k else 8, 16, dtype=torch.bfloat16, device=device)
    right = torch.randn(4 if right_k else 8, 24, dtype=torch.bfloat16, device=device)
    gradients = []
    for serves in (False, True):
        monkeypatch.setattr(weight_gradient, "_grouped_mm_serves", lambda *_, serves=serves: serves)
        gradients.append(weight_gradient.weight_gradient(left, right, route, 8, 5, left_k, right_k))
    assert gradients[1].shape == (5, 16, 24)
    assert not gradients[1][[0, 2]].any()
    assert gradients[1][[1, 3, 4]].any()
    torch.testing.assert_close(*gradients, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-3)


class Waiting(TorchDispatchMode):
    """Notes each operation that would tell the host what the device computed."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "bincount", "equal", "is_nonzero", "_to_copy"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class TestLaunches:
    @pytest.mark.parametrize("way", few_on("triton", ["stacked", *(way for way in FEW if way != "stacked")], 2))
    def test_it_is_these_operations_and_the_host_waits_for_nothing(self, device, launched, way):
        named = on(device, arguments(**TINY | FEW[way]))
        with Waiting() as waiting:
            run(moe, named, torch.ones_like(named["x"]))
        assert waiting.found == []
        called = callable(FEW[way].get("activation")) or "post" in FEW[way]
        assert launched[:3] == (STEPS if called else FUSED[:3])

    def test_it_would_be_noticed(self):
        with Waiting() as waiting:
            torch.ones(3).sum().item()
        assert waiting.found

    def test_each_gradient_is_computed_if_it_is_wanted(self, device, launched):
        named = on(device, arguments(biased=True, **TINY))
        kept = {
            "x": ["gate_backward", "project", "combine"],
            "top_k_weights": ["gate_backward"],
            "gate_up": ["gate_backward", "gather", "outer_products"],
            "down": ["gate_backward", "gather", "outer_products"],
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


class TestLimits:
    def test_listed_matrices_that_are_strided_are_the_reference_s(self, device, launched):
        named = on(device, arguments(listed=True, **TINY))
        named["down"] = [matrix.detach().mT.contiguous().mT for matrix in named["down"]]
        with torch.no_grad():
            assert torch.equal(moe(**named), reference.moe(**named))
        assert not launched

    @pytest.mark.parametrize("projection", ["up", "down"])
    def test_a_list_beside_a_stack_is_the_reference_s(self, device, launched, projection):
        named = on(device, arguments(listed=True, **TINY))
        named[projection] = torch.stack(named[projection]).detach()
        with torch.no_grad():
            assert torch.equal(moe(**named), reference.moe(**named))
        assert not launched


class TestTracers:
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
            weight_gradient.gather: (x, route, 6, 2),
            weight_gradient.outer_products: (before, x.repeat_interleave(2, 0), route, 3),
            weight_gradient.bias_gradient: (x, weights, route, 6, 3, 2),
            combine.combine: (before, index, weights, 3, torch.float32),
            combine.combine_backward: (x, x[:1].expand(6, -1).contiguous(), index, weights, 3),
        }
        for operation, arguments_ in calls.items():
            torch.library.opcheck(operation.op, arguments_, test_utils=("test_schema", "test_faketensor"))
