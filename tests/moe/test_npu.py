"""What is specific to the mixture of experts on NPUs: chips, lists of weights, limits, launches, and what is kept."""

import itertools

import pytest
import torch
from support.mixtures import EVERY_WAY, HALF, arguments, assert_close, assert_right, leaves, on, on_device, run, wide
from support.thorough import covering
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuseplug_backends.npu import here
from fuseplug_host_npu import ContractError, HostNPU
from fuseplug_moe import reference
from fuseplug_moe.backends import counts_on_host
from fuseplug_moe.backends.counts_on_host import HostCounts
from fuseplug_moe.backends.npu import GmmFunction, HybridGmmFunction, gmm, moe

FUSED = {"npu_moe_token_permute", "npu_grouped_matmul", "npu_moe_token_unpermute"}


@pytest.fixture(autouse=True)
def _npu(backend):
    """Uses `backend`, which knows what CANN has."""


def on_npu(named):
    return on_device(moe, named, "npu")


def npu_ops(calls):
    """torch_npu's operations among *calls*, without the underscore that autograd puts before some of the names."""
    names = {name.removeprefix("_") for name in calls}
    return {name for name in names if name.startswith(("npu_moe", "npu_grouped", "npu_swi", "npu_geg", "npu_clip"))}


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend950PR_9599"])
@pytest.mark.parametrize("way", ["stacked", "listed", "listed, idle without gradient", "as in gpt-oss", "post"])
def test_experts_add_nothing_on_any_chip(host_npu, monkeypatch, way, soc):
    """In half precision, where weights are passed as a list, and in float32, which Ascend 950 does not multiply."""
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


def test_the_host_is_told_only_for_weights_that_want_gradients(host_npu, monkeypatch):
    told = []
    monkeypatch.setattr(counts_on_host, "HostCounts", lambda *routing: told.append(routing) or HostCounts(*routing))
    named = on("npu", arguments(listed=True, idle="none"))
    moe(**named)
    assert len(told) == 1
    with torch.no_grad():
        moe(**named)
    frozen = {"gate_up", "up", "down"}
    moe(**{name: [w.detach() for w in value] if name in frozen else value for name, value in named.items()})
    assert len(told) == 1


class Waiting(TorchDispatchMode):
    """Notes each operation that makes the host wait, because it tells the host something that the device computed."""

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
    """What runs on the device. The host does not wait for any of it."""

    @pytest.mark.parametrize("way", [way for way in EVERY_WAY if way != "no token"])
    def test_it_is_the_operations_and_the_host_waits_for_nothing(self, host_npu, way):
        with Waiting() as waiting:
            on_device = on("npu", arguments(**EVERY_WAY[way]))
            run(moe, on_device, torch.ones_like(on_device["x"]))
        assert waiting.found == []
        assert npu_ops(host_npu.calls) >= FUSED

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
    """How many bytes a call of *function* keeps, apart from its own arguments."""
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
    """The reference computes a call that goes beyond what is documented."""

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
        """One slot of one token, and an upstream gradient whose strides are not those of its size."""
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


def test_qwen3_30b_a3b_fits_the_limits(fake_npu):
    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="npu", requires_grad=dtype is torch.bfloat16)

    named = {
        "x": tensor(4 * 4096, 2048),
        "top_k_index": tensor(4 * 4096, 8, dtype=torch.int64),
        "top_k_weights": tensor(4 * 4096, 8),
        "gate_up": tensor(128, 2 * 768, 2048),
        "down": tensor(128, 2048, 768),
    }
    gradients = run(moe, named, torch.empty_like(named["x"]))[1:]
    assert [g.shape for g in gradients] == [t.shape for t in named.values() if t.requires_grad]


COUNTS = {"some idle": [2, 0, 3, 1], "one group": [6], "a tail": [2, 1, 0], "one row": [0, 1], "all in one": [0, 6]}


class TestGroupedMatmul:
    """The two autograd functions alone, against a loop over the groups."""

    def tensors(self, counts, dtype, *, transposed, biased):
        generator = torch.Generator().manual_seed(3)
        rows = max(1, 6 if sum(counts) != 1 else 1)
        x = torch.randn(rows, 5, generator=generator).to(dtype).requires_grad_()
        shape = (len(counts), 4, 5) if transposed else (len(counts), 5, 4)
        weight = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        bias = torch.randn(len(counts), 4, generator=generator).to(gmm.DTYPES[dtype]).requires_grad_()
        return x, weight, bias if biased else None

    @staticmethod
    def loop(x, weight, bias, counts):
        pieces = [
            piece @ matrix + (0 if bias is None else bias[group].to(x.dtype))
            for group, (piece, matrix) in enumerate(zip(x[: sum(counts)].split(counts), weight, strict=True))
        ]
        return torch.cat(pieces)

    @pytest.mark.parametrize(
        ("counts", "listed", "transposed", "biased", "dtype"),
        covering(itertools.product(COUNTS, *[[False, True]] * 3, HALF)),
        ids=str,
    )
    def test_is_a_loop_over_groups_and_so_are_the_gradients(self, host_npu, counts, listed, transposed, biased, dtype):
        counts = COUNTS[counts]
        x, weight, bias = self.tensors(counts, dtype, transposed=transposed, biased=biased)
        inner = weight.mT if transposed else weight
        expected = self.loop(x, inner, bias, counts)
        upstream = torch.randn(expected.shape, generator=torch.manual_seed(4)).to(dtype)
        wanted = [t for t in (x, weight, bias) if t is not None]
        true = [expected, *torch.autograd.grad(expected, wanted, upstream)]

        x, weight, bias = (None if t is None else on("npu", t) for t in (x, weight, bias))
        group_list = torch.tensor(counts).to("npu")
        if listed:
            each = leaves(weight)
            result = HybridGmmFunction.apply(x, group_list, bias, None, *(w.t() if transposed else w for w in each))
        else:
            each = [weight]
            result = GmmFunction.apply(x, weight.mT if transposed else weight, group_list, bias)
        upstream = torch.cat((upstream, upstream.new_zeros(len(x) - len(upstream), 4))).to("npu")
        of_x, *of_each = torch.autograd.grad(result, [x, *each, *([] if bias is None else [bias])], upstream)
        of_bias = of_each.pop() if bias is not None else None
        of_weight = torch.stack(of_each) if listed else of_each[0]
        found = [result[: sum(counts)], of_x[: sum(counts)], of_weight, of_bias]
        true[1] = true[1][: sum(counts)]
        assert_close([each.detach().cpu() for each in found if each is not None], true, HALF[dtype])

    @pytest.mark.parametrize("transposed", [False, True])
    def test_gradients_of_weights_lie_as_these_do(self, host_npu, transposed):
        x, weight, _ = self.tensors([3, 3], torch.float32, transposed=transposed, biased=False)
        x, weight = on("npu", [x, weight])
        result = GmmFunction.apply(x, weight.mT if transposed else weight, torch.tensor([3, 3]).to("npu"))
        given = []
        weight.register_hook(given.append)
        result.sum().backward()
        assert given[0].stride() == weight.stride()

    def test_gradients_are_not_differentiated_in_silence(self, host_npu):
        x, weight, _ = self.tensors([3, 3], torch.float32, transposed=False, biased=False)
        x, weight = on("npu", [x, weight])
        result = GmmFunction.apply(x, weight, torch.tensor([3, 3]).to("npu"))
        (gradient,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()
