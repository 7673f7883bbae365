"""The mixture of experts on an NPU: values and gradients against the reference on the CPU, limits, what is launched."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import EVERY_WAY, FEW, HALF, arguments, assert_close, assert_right, on, run, wide
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuseplug_backends.npu import here
from fuseplug_host_npu import ContractError, HostNPU
from fuseplug_moe import reference
from fuseplug_moe.backends import counts_on_host
from fuseplug_moe.backends.counts_on_host import HostCounts
from fuseplug_moe.backends.npu import gmm, moe

from .mixtures import FUSED, assert_parameters_right, npu_ops, on_npu


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("way", EVERY_WAY)
    def test_are_the_reference_s_and_so_are_all_gradients(self, host_npu, way, dtype):
        named = arguments(dtype=dtype, **EVERY_WAY[way])
        found = on_npu(named)
        assert_right(found, named, dtype)
        assert (npu_ops(host_npu.calls) >= FUSED) == (way != "no token")

    @pytest.mark.parametrize("routing_dtype", HALF, ids=str)
    @pytest.mark.parametrize("dtype", HALF, ids=str)
    def test_weights_may_have_a_dtype_of_their_own(self, host_npu, dtype, routing_dtype):
        named = arguments(dtype=dtype)
        named["top_k_weights"] = named["top_k_weights"].detach().to(routing_dtype).requires_grad_()
        named["top_k_index"] = named["top_k_index"].to(torch.int32)
        found = on_npu(named)
        assert_right(found, named, max(dtype, routing_dtype, key=HALF.get))

    def test_the_sum_is_not_rounded_to_the_experts_where_rows_are_wider(self, host_npu):
        named = arguments(dtype=torch.bfloat16)
        named["x"] = named["x"].detach().float().requires_grad_()
        found, expected = on_npu(named)[0], run(reference.moe, named)[0]
        assert found.dtype == torch.float32
        assert not torch.equal(found, found.bfloat16().float())
        torch.testing.assert_close(found, expected, rtol=0, atol=HALF[torch.bfloat16] * expected.abs().max().item())

    def test_all_tokens_may_go_to_one_expert(self, host_npu):
        named = arguments(k=1)
        named["top_k_index"].fill_(3)
        found = on_npu(named)
        assert_right(found, named, torch.float32)
        assert not found[3][[0, 1, 2, 4]].any()

    @pytest.mark.parametrize("way", FEW)
    def test_strided_inputs_are_as_good(self, host_npu, way):
        named = arguments(**FEW[way])
        expected = on_npu(named)
        named["x"] = named["x"].detach().repeat_interleave(2, 1)[:, ::2].requires_grad_()
        named["top_k_index"] = named["top_k_index"].t().contiguous().t()
        named["top_k_weights"] = named["top_k_weights"].detach().t().contiguous().t().requires_grad_()
        assert_close(on_npu(named), expected, 1e-6)

    @pytest.mark.parametrize("way", FEW)
    def test_without_gradients_they_are_the_same(self, host_npu, way):
        named = on("npu", arguments(**FEW[way]))
        with torch.no_grad():
            quiet = moe(**named)
        assert torch.equal(quiet.cpu(), moe(**named).detach().cpu())

    def test_autocast_changes_nothing(self, host_npu):
        named = on("npu", arguments())
        with torch.autocast("npu", torch.bfloat16):
            inside = moe(**named)
        assert torch.equal(inside.cpu(), moe(**named).cpu())

    @pytest.mark.parametrize("frozen", ["x", "top_k_weights", "gate_up", "down"])
    def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(self, host_npu, frozen):
        named = arguments()
        full = dict(zip(("x", "top_k_weights", "gate_up", "down"), on_npu(named)[1:], strict=True))
        named[frozen] = named[frozen].detach()
        del full[frozen]
        assert_close(on_npu(named)[1:], list(full.values()), 1e-6)


@pytest.mark.parametrize("wanted", ["x", "top_k_weights", "gate_up", "down"])
@pytest.mark.parametrize("way", ["stacked", "gelu, concatenated"])
def test_a_second_derivative_is_refused(host_npu, way, wanted):
    named = on("npu", arguments(**EVERY_WAY[way]))
    result = moe(**named)
    with pytest.raises(RuntimeError, match="npu_moe_token_unpermute of torch_npu has no second derivative"):
        torch.autograd.grad(result.square().sum(), named[wanted], create_graph=True)


class TestElsewhere:
    """The grouped matmul leaves rows of experts elsewhere as they were: NaN, here."""

    @pytest.mark.parametrize("elsewhere", [1, 5, 14], ids=["one", "some", "all"])
    @pytest.mark.parametrize("way", [*FEW, "silu-clamp-before, concatenated", "gelu, concatenated", "listed, own"])
    def test_experts_add_nothing_to_results_and_gradients(self, host_npu, way, elsewhere):
        named = arguments(**EVERY_WAY[way])
        named["top_k_index"].view(-1)[torch.randperm(14, generator=torch.manual_seed(0))[:elsewhere]] = 5
        found = on_npu(named)
        assert host_npu.calls["npu_grouped_matmul"]
        assert_right(found, named, torch.float32)

    @pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend950PR_9599"])
    @pytest.mark.parametrize("way", ["stacked", "listed", "listed, idle without gradient", "as in gpt-oss", "post"])
    def test_experts_add_nothing_on_any_chip(self, host_npu, monkeypatch, way, soc):
        """In half precision, in which weights go as a list, and in float32, of which Ascend 950 multiplies none."""
        lists = []
        asked = gmm._gmm
        monkeypatch.setattr(gmm, "_gmm", lambda x, w, *a, **k: lists.append(len(w)) or asked(x, w, *a, **k))
        for dtype in (torch.float32, torch.bfloat16):
            named = arguments(dtype=dtype, **EVERY_WAY[way])
            if way != "listed, idle without gradient":
                named["top_k_index"].view(-1)[:5] = 5
            lists.clear()
            with HostNPU(soc=soc) as chip:
                found = on_npu(named)
            assert_right(found, named, dtype)
            is_950 = "950" in soc
            assert bool(chip.calls["npu_grouped_matmul"]) == (dtype is torch.bfloat16 or not is_950)
            as_a_list = "listed" in way and dtype is torch.bfloat16 and not is_950
            assert max(lists, default=1) == (len(named["down"]) if as_a_list else 1)

    def test_a_negative_index_is_an_expert_elsewhere(self, host_npu):
        named, elsewhere = arguments(), arguments()
        named["top_k_index"][2, 0], elsewhere["top_k_index"][2, 0] = -1, 5
        assert_close(on_npu(named), on_npu(elsewhere), 0.0)

    @pytest.mark.parametrize("where", ["post", "activation"])
    def test_experts_add_nothing_to_the_gradients_of_a_function_of_rows(self, host_npu, where):
        assert_parameters_right(where)

    def test_experts_add_nothing_even_with_an_infinite_weight(self, host_npu):
        named = arguments()
        named["top_k_index"][2, 0] = 2**40
        plain = on_npu(named)
        named["top_k_weights"].detach()[2, 0] = float("inf")
        assert_close(on_npu(named), plain, 0.0)


class TestIdle:
    @pytest.mark.parametrize("idle", ["zero", "none"])
    def test_listed_experts_without_tokens_have_the_gradient_asked_for(self, host_npu, idle):
        named = arguments(tokens=3, experts=9, listed=True, idle=idle)
        found, expected = on_npu(named), run(reference.moe, named)
        assert sum(each is None for each in expected) == (0 if idle == "zero" else 3 * (9 - 5))
        assert_close(found, expected, HALF[torch.float32])

    def test_stacked_experts_without_tokens_have_gradients_of_zeros(self, host_npu):
        named = arguments(tokens=1, experts=9)
        (hit,) = named["top_k_index"].tolist()
        for gradient in on_npu(named)[3:]:
            assert [bool(each.any()) for each in gradient] == [expert in hit for expert in range(9)]

    def test_the_host_is_told_only_for_weights_that_want_gradients(self, host_npu, monkeypatch):
        told = []
        monkeypatch.setattr(counts_on_host, "HostCounts", lambda counts: told.append(counts) or HostCounts(counts))
        named = on("npu", arguments(listed=True, idle="none"))
        moe(**named)
        assert len(told) == 1
        with torch.no_grad():
            moe(**named)
        frozen = {"gate_up", "up", "down"}
        moe(**{name: [w.detach() for w in value] if name in frozen else value for name, value in named.items()})
        assert len(told) == 1


class Waiting(TorchDispatchMode):
    """Notes each operation that the host has to wait for: one that tells it something of what the device computed."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.device.type == "npu" for t in given):
            told = [t for t in tree_leaves(result) if not isinstance(t, torch.Tensor) or t.device.type == "cpu"]
            in_passing = func is torch.ops.aten.copy_.default and args[2:] == (True,) and args[0].is_pinned()
            sized = func.overloadpacket in (torch.ops.aten.nonzero, torch.ops.aten.bincount)
            sized |= func.overloadpacket is torch.ops.aten.index and any(t.dtype is torch.bool for t in given)
            if (told and not in_passing) or sized:
                self.found.append(func.overloadpacket.__name__)
        return result


class TestLaunches:
    """What runs on the device, and that the host does not wait for it."""

    @pytest.mark.parametrize("way", [way for way in EVERY_WAY if way != "no token"])
    def test_the_host_waits_for_nothing(self, host_npu, way):
        with Waiting() as waiting:
            on_device = on("npu", arguments(**EVERY_WAY[way]))
            run(moe, on_device, torch.ones_like(on_device["x"]))
        assert waiting.found == []

    @pytest.mark.parametrize(
        "wait",
        [
            lambda x: x.tolist(),
            lambda x: x.sum().item(),
            lambda x: bool(x.any()),
            lambda x: x[x > 0],
            lambda x: torch.bincount(x.int()),
            lambda x: torch.empty(3, device="cpu").copy_(x),
            lambda x: torch.empty(3, device="cpu").copy_(x, non_blocking=True),
        ],
    )
    def test_it_would_be_noticed(self, host_npu, wait):
        with Waiting() as waiting:
            wait(torch.ones(3, device="npu"))
        assert waiting.found

    def test_each_gradient_is_computed_if_it_is_wanted(self, host_npu):
        named = on("npu", arguments(biased=True))
        result = moe(**named)
        for wanted, products in (("down", 1), ("down_bias", 1), ("top_k_weights", 0), ("gate_up", 2), ("x", 2)):
            host_npu.calls.clear()
            alone = {name: value.detach() if name != wanted else value for name, value in named.items()}
            result = moe(**alone)
            forward = host_npu.calls["npu_grouped_matmul"]
            torch.autograd.grad(result.sum(), named[wanted])
            assert (forward, host_npu.calls["npu_grouped_matmul"] - forward) == (2, products)

    @pytest.mark.parametrize(
        ("way", "op"),
        [
            ("stacked", "npu_swiglu"),
            ("gelu, concatenated", "npu_geglu"),
            ("gelu_tanh, concatenated", "npu_geglu"),
            ("as in gpt-oss", "npu_clipped_swiglu"),
            ("swish-clamp-before-offset, concatenated", "npu_clipped_swiglu"),
            ("silu-clamp-before, concatenated", "npu_clipped_swiglu"),
            ("silu-clamp-before, interleaved", "npu_clipped_swiglu"),
        ],
    )
    def test_the_gate_is_one_operation(self, host_npu, way, op):
        with torch.no_grad():
            moe(**on("npu", arguments(**EVERY_WAY[way])))
        assert npu_ops(host_npu.calls) == FUSED | {op}
        assert host_npu.calls[op] == 1

    def test_nothing_more_is_kept_for_the_backward_than_by_the_reference(self, host_npu):
        named = arguments(tokens=60, hidden=32, inner=16, dtype=torch.bfloat16)
        assert kept(moe, on("npu", named)) <= kept(reference.moe, named)


def kept(function, named):
    """How many bytes a call of *function* keeps, but those of its own arguments."""
    own = {t.untyped_storage().data_ptr() for t in named.values() if isinstance(t, torch.Tensor)}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(**named)
    del result
    return sum(size for size, _ in found.values())


BEYOND = {
    "float64": wide(arguments()),
    "weights in float64": arguments() | {"top_k_weights": torch.rand(7, 2, dtype=torch.float64)},
    "no token": arguments(tokens=0),
    "more than 512 choices": arguments(tokens=2, experts=513, k=513, hidden=4, inner=2),
    "more than 1024 experts": arguments(tokens=2, experts=1025, hidden=4, inner=2),
    "65536 columns": arguments(tokens=2, experts=2, k=1, hidden=65536, inner=1),
    "bias of another dtype": arguments(biased=True) | {"down_bias": torch.rand(5, 12, dtype=torch.float64)},
}


class TestLimits:
    """A call that is not documented is the reference's."""

    @pytest.mark.parametrize("call", BEYOND)
    def test_beyond_them_it_is_the_reference(self, host_npu, call):
        named = BEYOND[call]
        with torch.no_grad():
            found = moe(**on("npu", named))
            assert not npu_ops(host_npu.calls)
            torch.testing.assert_close(found.cpu(), reference.moe(**named))

    def test_strided_weights_are_the_reference_s(self, host_npu):
        named = on("npu", arguments())
        named["down"] = named["down"].detach().repeat_interleave(2, 2)[:, :, ::2]
        with torch.no_grad():
            found = moe(**named)
            assert not npu_ops(host_npu.calls)
            torch.testing.assert_close(found.cpu(), reference.moe(**on("cpu", named)))

    @pytest.mark.parametrize("experts", [128, 129])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_list_is_stacked_where_a_list_is_not_documented(self, host_npu, monkeypatch, dtype, experts):
        lists = []
        asked = gmm._gmm
        monkeypatch.setattr(gmm, "_gmm", lambda x, w, *a, **k: lists.append(len(w)) or asked(x, w, *a, **k))
        named = arguments(experts=experts, hidden=4, inner=2, dtype=dtype, listed=True)
        found = on_npu(named)
        assert_right(found, named, dtype)
        assert max(lists) == (128 if (experts, dtype) == (128, torch.bfloat16) else 1)

    @pytest.mark.parametrize("name", ["gate_up", "up", "down"])
    def test_a_list_of_weights_that_lie_differently_is_stacked(self, host_npu, name):
        named = arguments(dtype=torch.bfloat16, listed=True)
        named[name][2] = named[name][2].detach().mT.contiguous().mT.requires_grad_()
        assert_right(on_npu(named), named, torch.bfloat16)
        assert host_npu.calls["npu_grouped_matmul"]

    def test_what_it_was_would_be_refused(self, host_npu, monkeypatch):
        monkeypatch.setattr(gmm, "_operand", lambda weights, transposed: list(weights))
        named = arguments(dtype=torch.bfloat16, listed=True)
        named["down"][2] = named["down"][2].detach().mT.contiguous().mT.requires_grad_()
        with pytest.raises(ContractError, match="weight must be transposed in all its tensors"):
            on_npu(named)

    def test_a_single_row_is_ordered(self, host_npu):
        """One slot of one token, under a gradient of other strides than its size has."""
        named = on("npu", arguments(tokens=1, k=1))
        result = moe(**named)
        upstream = torch.ones(12, 5, device="npu")[:, :1].t()
        assert upstream.is_contiguous() is False or upstream.stride() != (12, 1)
        found = torch.autograd.grad(result, [named["gate_up"], named["down"]], upstream)
        own = on("cpu", named)
        expected = torch.autograd.grad(reference.moe(**own), [own["gate_up"], own["down"]], upstream.cpu())
        assert_close([each.cpu() for each in found], expected, 1e-5)

    @pytest.mark.parametrize("listed", [False, True])
    def test_rows_of_strides_that_torch_ignores(self, host_npu, listed):
        odd = torch.ones(9, device="npu").as_strided((1, 5), (1, 1)).detach().requires_grad_()
        weights = [torch.ones(5, 4, device="npu", requires_grad=True) for _ in range(2)]
        counts = torch.tensor([1, 0], device="npu")
        if listed:
            result = gmm.HybridGmmFunction.apply(odd, counts, None, None, *weights)
        else:
            result = gmm.GmmFunction.apply(odd, torch.stack(weights), counts, None)
        upstream = torch.ones(9, device="npu").as_strided((1, 4), (7, 1))
        of_x, of_weight = torch.autograd.grad(result, [odd, weights[0]], upstream)
        assert of_x.tolist() == [[4.0] * 5]
        assert of_weight.tolist() == [[1.0] * 4] * 5

    @pytest.mark.parametrize("way", ["as in gpt-oss", "silu-clamp-before, concatenated"])
    def test_a_cann_without_a_gate_computes_the_formula(self, host_npu, monkeypatch, way):
        monkeypatch.delitem(here._KNOWN, "npu_clipped_swiglu")
        named = arguments(**EVERY_WAY[way])
        with HostNPU(lacking={"npu_clipped_swiglu"}) as old:
            assert_right(on_npu(named), named, torch.float32)
        assert npu_ops(old.calls) == FUSED | {"npu_moe_token_unpermute_grad_v2"}

    @pytest.mark.parametrize("limit", [0.0, -1.0])
    def test_a_limit_that_is_not_above_zero_is_the_formula(self, host_npu, limit):
        named = arguments(**EVERY_WAY["as in gpt-oss"] | {"limit": limit})
        with torch.no_grad():
            found = moe(**on("npu", named))
        assert npu_ops(host_npu.calls) == FUSED
        torch.testing.assert_close(found.cpu(), reference.moe(**named).detach())

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
    def test_wrong_arguments_are_named_as_by_the_reference(self, host_npu, change, error):
        with pytest.raises((TypeError, ValueError), match=error):
            moe(**on("npu", arguments() | change))


class TestFake:
    """By torch_npu's own schemas, metas and derivatives."""

    @pytest.mark.parametrize("way", [way for way in EVERY_WAY if way != "no token"])
    def test_every_gradient_is_there_and_like_its_tensor(self, fake_npu, way):
        dtype = torch.bfloat16
        named = on("npu", on("cpu", arguments(dtype=dtype, **EVERY_WAY[way] | {"idle": "zero"})))
        result, *gradients = run(moe, named, torch.empty_like(named["x"]))
        wanted = [t for v in named.values() for t in (v if isinstance(v, list) else [v]) if is_wanted(t)]
        assert (result.shape, result.dtype, result.device) == (named["x"].shape, dtype, named["x"].device)
        for gradient, tensor in zip(gradients, wanted, strict=True):
            assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)

    def test_qwen3_30b_a3b_fits_the_limits(self, fake_npu):
        named = {
            "x": torch.empty(4 * 4096, 2048, dtype=torch.bfloat16, device="npu", requires_grad=True),
            "top_k_index": torch.empty(4 * 4096, 8, dtype=torch.int64, device="npu"),
            "top_k_weights": torch.empty(4 * 4096, 8, dtype=torch.bfloat16, device="npu", requires_grad=True),
            "gate_up": torch.empty(128, 2 * 768, 2048, dtype=torch.bfloat16, device="npu", requires_grad=True),
            "down": torch.empty(128, 2048, 768, dtype=torch.bfloat16, device="npu", requires_grad=True),
        }
        assert [each.shape for each in run(moe, named, torch.empty_like(named["x"]))[1:]] == [
            each.shape for each in named.values() if is_wanted(each)
        ]


def is_wanted(value):
    return isinstance(value, torch.Tensor) and value.requires_grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", FEW)
def test_compiled_it_is_one_graph_and_right(host_npu, way, backend):
    torch.compiler.reset()
    named = arguments(**FEW[way])
    found = on_npu(named, torch.compile(moe, fullgraph=True, backend=backend))
    assert npu_ops(host_npu.calls) >= FUSED
    assert_right(found, named, torch.float32)
