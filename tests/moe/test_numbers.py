"""The mixture of experts on each backend: values and all gradients, experts elsewhere, idle experts, and compilers."""

import itertools

import pytest
import torch
from support import backends
from support.mixtures import (
    EVERY_WAY,
    FEW,
    HALF,
    TINY,
    Scaled,
    arguments,
    assert_close,
    assert_right,
    on,
    on_device,
    run,
    wide,
)
from support.thorough import covering, few_on, first_quick, quick_if
from support.transforms import TRANSFORMS
from torch.utils.checkpoint import checkpoint

from fuseplug_moe import reference

QUICK = {*FEW, "ungated", "listed, idle without gradient", "transposed"}
"""One way for each branch of Triton's programs; the gates are those of gated MLPs."""

WAYS = quick_if(EVERY_WAY, QUICK) if backends.NAME == "triton" else list(EVERY_WAY)
ONE_OF_EACH = few_on("triton", ["stacked", "gate called", "as in gpt-oss", "listed", "post"], 2)
OWN = EVERY_WAY["listed, own"]["activation"]


@pytest.fixture
def moe(backend):
    return backend.module("moe").moe


@pytest.fixture
def result(backend, moe):
    """The result and every gradient of a call."""
    return lambda named, function=moe: on_device(function, named, backend.device)


def dtype_of(way):
    """One dtype for each way, because all dtypes with every way would take minutes."""
    return list(HALF)[sum(map(ord, way)) % len(HALF)]


@pytest.mark.parametrize("way", WAYS)
def test_every_way(backend, result, way):
    dtype = dtype_of(way)
    named = arguments(dtype=dtype, **TINY | EVERY_WAY[way])
    assert_right(result(named), named, dtype)
    assert backend.launches or backend.name == "inductor" or way == "no token"


@pytest.mark.parametrize(("way", "dtype"), covering(itertools.product(FEW, HALF)), ids=str)
def test_every_dtype(result, way, dtype):
    named = arguments(dtype=dtype, **TINY | FEW[way])
    assert_right(result(named), named, dtype)


@pytest.mark.parametrize(("dtype", "routing_dtype"), first_quick([(a, b) for a in HALF for b in HALF if a != b], 2))
def test_weights_may_have_a_dtype_of_their_own(result, dtype, routing_dtype):
    named = arguments(dtype=dtype, **TINY)
    named["top_k_weights"] = named["top_k_weights"].detach().to(routing_dtype).requires_grad_()
    named["top_k_index"] = named["top_k_index"].to(torch.int32)
    assert_right(result(named), named, max(dtype, routing_dtype, key=HALF.get))


@pytest.mark.parametrize("way", ["stacked", "gate called"])
def test_tokens_may_be_wider_than_the_experts(result, way):
    named = arguments(dtype=torch.bfloat16, **TINY | FEW[way])
    named["x"] = named["x"].detach().float().requires_grad_()
    y, *gradients = result(named)
    assert not torch.equal(y, y.bfloat16().float())
    assert_right([y, *gradients], named, torch.bfloat16)


def test_up_may_be_apart_and_the_gate_biased(result):
    named = arguments(layout="ungated", **TINY)
    named |= {"up": named["gate_up"].detach().flip(0).requires_grad_(), "layout": "concatenated"}
    named["gate_up_bias"] = torch.randn(len(named["up"]), 6, generator=torch.manual_seed(0)).requires_grad_()
    assert_right(result(named), named, torch.float32)


def test_all_tokens_may_go_to_one_expert(result):
    named = arguments(k=1, **TINY)
    named["top_k_index"].fill_(1)
    results = result(named)
    assert_right(results, named, torch.float32)
    assert results[3].flatten(1).any(1).nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("way", ONE_OF_EACH)
def test_strided_inputs_are_as_good(backend, moe, way):
    named = on(backend.device, arguments(**TINY | FEW[way]))
    upstream = torch.randn(named["x"].shape, generator=torch.Generator().manual_seed(9)).to(backend.device)
    expected = run(moe, named, upstream)
    named["x"] = named["x"].detach().repeat_interleave(2, 1)[:, ::2].requires_grad_()
    named["top_k_index"] = named["top_k_index"].t().contiguous().t()
    named["top_k_weights"] = named["top_k_weights"].detach().t().contiguous().t().requires_grad_()
    if backend.name != "npu" and not isinstance(named["gate_up"], list):  # NPUs leave these to the reference
        for name in ("gate_up", "down"):
            named[name] = named[name].detach().mT.contiguous().mT.requires_grad_()
    assert_close(run(moe, named, upstream.t().contiguous().t()), expected, 1e-6)


@pytest.mark.parametrize("way", ONE_OF_EACH)
def test_twice_it_is_the_same_and_the_arguments_stay(backend, moe, way):
    named = on(backend.device, arguments(dtype=torch.bfloat16, **TINY | FEW[way]))
    tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
    before = [t.detach().clone() for t in tensors]
    first, second = run(moe, named), run(moe, named)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("tokens", few_on("triton", [3, 1]))
@pytest.mark.parametrize("way", ONE_OF_EACH)
def test_without_gradients_it_is_the_same(backend, moe, way, tokens):
    named = on(backend.device, arguments(**TINY | FEW[way] | {"tokens": tokens}))
    with torch.no_grad():
        quiet = moe(**named)
    torch.testing.assert_close(quiet, moe(**named).detach(), rtol=1e-5, atol=1e-6)


def test_autocast_changes_nothing(backend, moe):
    named = on(backend.device, arguments(**TINY))
    with torch.autocast(backend.device, torch.bfloat16):
        inside = moe(**named)
    assert torch.equal(inside, moe(**named))


@pytest.mark.parametrize("frozen", few_on("triton", ["x", "gate_up", "down", "top_k_weights"], 2))
def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(result, frozen):
    named = arguments(**TINY)
    full = dict(zip(("x", "top_k_weights", "gate_up", "down"), result(named)[1:], strict=True))
    named[frozen] = named[frozen].detach()
    del full[frozen]
    assert_close(result(named)[1:], list(full.values()), 1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_where_it_is(backend, moe, value):
    named = arguments(**TINY)
    with torch.no_grad():
        named["x"][1, 1] = value
        y = moe(**on(backend.device, named)).cpu()
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


class TestElsewhere:
    """Experts that are elsewhere: nothing writes the memory of their rows, which is NaN in these tests."""

    @pytest.mark.parametrize("elsewhere", few_on("triton", [5, 1, 14]))
    @pytest.mark.parametrize(
        "way",
        few_on("triton", ["as in gpt-oss", *(way for way in FEW if way != "as in gpt-oss"), "gelu, concatenated"], 2),
    )
    def test_they_add_nothing_to_results_and_gradients(self, result, way, elsewhere):
        named = arguments(**EVERY_WAY[way])
        named["top_k_index"].view(-1)[torch.randperm(14, generator=torch.manual_seed(0))[:elsewhere]] = 5
        assert_right(result(named), named, torch.float32)

    @pytest.mark.parametrize("where", ["post", "activation"])
    def test_nor_to_the_gradients_of_a_function_of_rows(self, backend, moe, where):
        named = arguments(**TINY)
        named["top_k_index"].view(-1)[:4] = 9
        function = Scaled(12 if where == "post" else 6)
        (expected,) = torch.autograd.grad(reference.moe(**named, **{where: function}).sum(), function.weight)
        function.to(backend.device)
        y = moe(**on(backend.device, named), **{where: function})
        (gradient,) = torch.autograd.grad(y.sum(), function.weight)
        torch.testing.assert_close(gradient.cpu(), expected)

    @pytest.mark.parametrize("way", ["stacked", "gate called"])
    def test_nor_with_an_infinite_weight(self, backend, result, way):
        named = arguments(**TINY | FEW[way])
        named["top_k_index"][2, 0] = 9 if backend.name == "inductor" else 2**40  # the CPU counts every index up to it
        plain = result(named)
        named["top_k_weights"].detach()[2, 0] = float("inf")
        assert_close(result(named), plain, 0.0)

    def test_a_negative_index_is_one_or_refused(self, backend, moe):
        named = on(backend.device, arguments(**TINY))
        index = named["top_k_index"]
        negative, elsewhere = (named | {"top_k_index": index.masked_fill(index == 1, to)} for to in (-1, 9))
        if backend.name == "inductor":
            with torch.no_grad(), pytest.raises(IndexError, match="must not be negative; it has -1"):
                moe(**negative)
        else:
            assert torch.equal(moe(**negative).cpu(), moe(**elsewhere).cpu())


class TestIdle:
    @pytest.mark.parametrize("way", few_on("triton", [{}, {"activation": OWN}]), ids=["silu", "own"])
    @pytest.mark.parametrize("idle", ["none", "zero"])
    def test_listed_experts_without_tokens_have_the_gradient_asked_for(self, result, idle, way):
        named = arguments(tokens=2, experts=6, listed=True, idle=idle, **way)
        results = result(named)
        hit = set(named["top_k_index"].flatten().tolist())
        assert sum(t is None for t in results) == (0 if idle == "zero" else 3 * (6 - len(hit)))
        assert_right(results, named, torch.float32)

    def test_stacked_experts_without_tokens_have_gradients_of_zeros(self, result):
        named = arguments(tokens=1, experts=5, biased=True)
        (hit,) = named["top_k_index"].tolist()
        for gradient in result(named)[3:]:
            assert [bool(t.any()) for t in gradient] == [expert in hit for expert in range(5)]


@pytest.mark.parametrize(
    "way", few_on("triton", ["stacked", "listed, idle without gradient", "as in gpt-oss", "gate called", "post"], 2)
)
def test_a_recomputation_that_chooses_other_experts(backend, result, moe, way):
    """The gradients are those of the recomputation's experts, as for an original whose sizes depend on no choice."""
    named = arguments(**TINY | EVERY_WAY[way])
    choices = [named["top_k_index"], (named["top_k_index"] + 1) % len(named["down"])]

    def recomputed(**named):
        again = iter(choices)
        return checkpoint(
            lambda x: moe(**named | {"x": x, "top_k_index": next(again).to(x.device)}), named["x"], use_reentrant=False
        )

    found, expected = result(named, recomputed), run(reference.moe, named | {"top_k_index": choices[1]})
    assert_close(found[1:], expected[1:], 1e-4)


# Inside torch.func, the NPU in host memory has no argsort, which the reference calls.
@pytest.mark.parametrize("transform", ["tangent"] if backends.NAME == "npu" else ["grad", "jvp", "tangent"])
@pytest.mark.parametrize("way", ["stacked", "listed"])
def test_transforms_see_the_reference(backend, moe, way, transform):
    named = on(backend.device, arguments(tokens=2, hidden=4, inner=3, experts=2, **EVERY_WAY[way]))
    x = named["x"].detach()
    ours, theirs = (TRANSFORMS[transform](lambda x, f=f: f(**named | {"x": x}))(x) for f in (moe, reference.moe))
    torch.testing.assert_close(ours, theirs)
    assert not backend.launches


@pytest.mark.parametrize("way", few_on("triton", ["stacked", "listed", "as in gpt-oss", "gate called", "post"], 2))
def test_a_second_derivative_is_the_formula_s_or_refused(backend, moe, way):
    named = on(backend.device, arguments(tokens=2, hidden=4, inner=3, experts=2, **EVERY_WAY[way]))
    tensors = [t for v in named.values() for t in (v if isinstance(v, list) else [v]) if isinstance(t, torch.Tensor)]
    wanted = [t for t in tensors if t.requires_grad]

    def twice(function):
        first = torch.autograd.grad(function(**named).square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    if backend.differentiable_twice:
        torch.testing.assert_close(twice(moe), twice(reference.moe), rtol=1e-4, atol=1e-5)
        return
    with pytest.raises(RuntimeError, match="npu_moe_token_unpermute of torch_npu has no second derivative"):
        twice(moe)


BEYOND = {
    "float64": wide(arguments()),
    "float64, many experts": wide(arguments(tokens=30, experts=9, hidden=16, inner=8)),
    "no choice": arguments(tokens=1)
    | {"top_k_index": torch.zeros(1, 0, dtype=torch.int64), "top_k_weights": torch.zeros(1, 0)},
    "weights in float64": arguments() | {"top_k_weights": torch.rand(7, 2, dtype=torch.float64)},
    "no token": arguments(tokens=0),
    "down of another dtype": arguments() | {"down": torch.rand(5, 12, 6, dtype=torch.bfloat16)},
    "bias of another dtype": arguments(biased=True) | {"down_bias": torch.rand(5, 12, dtype=torch.float64)},
}


@pytest.mark.parametrize("call", BEYOND)
def test_what_is_rare_is_the_reference_s(backend, moe, call):
    named = BEYOND[call]
    with torch.no_grad():
        outcomes = []
        for function in (moe, reference.moe):
            try:
                outcomes.append(function(**on(backend.device, named)).cpu())
            except RuntimeError as error:
                outcomes.append(str(error))
    if isinstance(outcomes[1], str):
        assert outcomes[0] == outcomes[1]
    else:
        torch.testing.assert_close(*outcomes)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"x": torch.zeros(3, 4, dtype=torch.int64)}, TypeError, "x must be floating"),
        ({"x": torch.zeros(2, 3, 4)}, TypeError, r"\(tokens, hidden\)"),
        ({"top_k_index": torch.zeros(7, 2)}, TypeError, "top_k_index must be integers"),
        ({"top_k_index": torch.zeros(6, 2, dtype=torch.int64)}, TypeError, r"integers \(7, k\)"),
        ({"top_k_weights": torch.zeros(7, 3)}, ValueError, r"shape of top_k_index, \[7, 2\]; it has \[7, 3\]"),
        ({"gate_up": torch.zeros(5, 12, 11)}, ValueError, r"gate_up must be \[5, 12, 12\].*it is \[5, 12, 11\]"),
        ({"down": torch.zeros(4, 12, 6)}, ValueError, r"down must be \[5, 12, 6\]"),
        ({"down_bias": torch.zeros(5, 6)}, ValueError, r"down_bias must be \[5, 12\]"),
        ({"activation": "swish"}, ValueError, "unknown activation 'swish'; known: silu"),
        ({"activation": "swish-clamp-before-offset"}, ValueError, "clamps: give it a limit"),
        ({"layout": "mixed"}, ValueError, "layout must be"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(moe, wrong, error, message):
    for function in (moe, reference.moe):
        with pytest.raises(error, match=message):
            function(**{**arguments(tokens=7, experts=5), **wrong})


ONE_GRAPH = ["as in gpt-oss", "stacked", "listed", "gate called", "post"]
if backends.NAME == "inductor":
    ONE_GRAPH.remove("listed")  # the host reads how many rows each listed expert has


@pytest.mark.parametrize("way", few_on("triton", ONE_GRAPH))
def test_compiled_it_is_one_graph_and_right(result, moe, way):
    torch.compiler.reset()
    named = arguments(**TINY | FEW[way])
    assert_right(result(named, torch.compile(moe, fullgraph=True, backend="aot_eager")), named, torch.float32)


@pytest.mark.skipif(backends.NAME == "npu", reason="torch_npu's operations are not for transforms")
def test_a_functorch_transform_sees_through_it(backend, moe):
    named = on(backend.device, arguments(**TINY))
    fixed = {name: value for name, value in named.items() if name != "x"}
    gradient = torch.func.grad(lambda x: moe(x, **fixed).sum())(named["x"].detach())
    torch.testing.assert_close(gradient, run(reference.moe, named, torch.ones_like(named["x"]))[1])


@pytest.mark.skipif(backends.NAME == "inductor", reason="on the CPU, the host reads where tokens go")
@pytest.mark.parametrize("way", [way for way in EVERY_WAY if way != "no token"])
def test_every_fake_gradient_is_there_and_like_its_tensor(fake_backend, way):
    dtype = torch.bfloat16
    moe = fake_backend.module("moe").moe
    named = on(fake_backend.device, on("cpu", arguments(dtype=dtype, **EVERY_WAY[way] | {"idle": "zero"})))
    y, *gradients = run(moe, named, torch.empty_like(named["x"]))
    tensors = [t for v in named.values() for t in (v if isinstance(v, list) else [v]) if isinstance(t, torch.Tensor)]
    wanted = [t for t in tensors if t.requires_grad]
    assert (y.shape, y.dtype, y.device) == (named["x"].shape, dtype, named["x"].device)
    assert [(g.shape, g.dtype) for g in gradients] == [(t.shape, t.dtype) for t in wanted]
