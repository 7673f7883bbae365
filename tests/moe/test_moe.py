"""The op itself: the reference against a loop over tokens, and the kernel against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.mixtures import HALF, WAYS, arguments, assert_close, run
from support.thorough import covering
from torch.nn import functional

from fuseplug_moe import reference
from fuseplug_moe.backends import inductor
from fuseplug_moe.backends.inductor import matrix_products


def token_by_token(x, top_k_index, top_k_weights, gate_up, down):
    """What is meant, in the fewest words."""
    rows = []
    for token, experts, weights in zip(x, top_k_index, top_k_weights, strict=True):
        row = torch.zeros_like(token)
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            if expert < len(gate_up):
                gate, up = (gate_up[expert] @ token).chunk(2)
                row = row + weight * (down[expert] @ (functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("function", [reference.moe, inductor.moe])
@pytest.mark.parametrize("elsewhere", [0, 3, 14], ids=["all here", "some elsewhere", "all elsewhere"])
def test_is_the_weighted_sum_of_the_experts_of_each_token(function, elsewhere):
    named = arguments()
    named["top_k_index"].view(-1)[:elsewhere] = 5
    assert_close(
        [t if t is not None else torch.zeros(()) for t in run(function, named)],
        [
            t if t is not None else torch.zeros_like(like)
            for t, like in zip(run(token_by_token, named), run(function, named), strict=True)
        ]
        if elsewhere < 14
        else run(reference.moe, named),
        2e-5,
    )
    if elsewhere == 14:
        assert not function(**named).any()


@pytest.mark.parametrize("function", [reference.moe, inductor.moe])
def test_an_expert_elsewhere_adds_nothing_even_with_an_infinite_weight(function):
    named = arguments()
    named["top_k_index"][2, 0] = 5
    plain = function(**named)
    named["top_k_weights"] = named["top_k_weights"].detach().clone()
    named["top_k_weights"][2, 0] = float("inf")
    assert torch.equal(function(**named), plain)


@pytest.mark.parametrize(("way", "dtype"), covering(itertools.product(WAYS, HALF)), ids=str)
def test_the_kernel_computes_what_the_reference_does(way, dtype):
    named = arguments(dtype=dtype, **WAYS[way])
    wide = {
        name: [t.detach().double().requires_grad_() for t in value]
        if isinstance(value, list)
        else value.detach().double().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in named.items()
    }
    truth = run(reference.moe, wide)
    found = run(inductor.moe, named)
    assert_close(found, [None if t is None else t.to(f.dtype) for t, f in zip(truth, found, strict=True)], HALF[dtype])


@pytest.mark.parametrize("name", reference.GATES)
def test_every_gate_of_the_table_is_another_function(name):
    rows = torch.linspace(-9, 9, 64).view(4, 16)
    values = {other: reference.apply_gate(rows, None, other, "concatenated", 2.0, 1.702) for other in reference.GATES}
    assert not [other for other in values if other != name and torch.allclose(values[other], values[name], atol=1e-5)]


def test_it_is_the_same_each_time_and_leaves_its_inputs_alone():
    named = arguments(tokens=900, hidden=64, inner=32, dtype=torch.bfloat16)
    versions = {name: value._version for name, value in named.items() if isinstance(value, torch.Tensor)}
    one, other = run(inductor.moe, named), run(inductor.moe, named)
    assert all(map(torch.equal, one, other))
    assert versions == {name: named[name]._version for name in versions}


@pytest.mark.parametrize("tokens", [None, 1], ids=["as it is", "one token"])
@pytest.mark.parametrize("way", WAYS)
def test_without_gradients_it_is_the_same(way, tokens):
    named = arguments(**WAYS[way] | ({} if tokens is None else {"tokens": tokens}))
    with torch.no_grad():
        quiet = inductor.moe(**named)
    torch.testing.assert_close(quiet, inductor.moe(**named).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_one_token_is_not_sorted(dtype, monkeypatch):
    named = arguments(tokens=1, dtype=dtype)
    expected = inductor.moe(**named)
    monkeypatch.setattr(inductor, "_sort", None)
    with torch.no_grad():
        assert_close([inductor.moe(**named)], [expected], HALF[dtype])


@pytest.mark.parametrize("elsewhere", [1, 2])
def test_one_token_may_have_experts_elsewhere(elsewhere):
    named = arguments(tokens=1, transposed=True, biased=True)
    named["top_k_index"][0, :elsewhere] = 7
    with torch.no_grad():
        torch.testing.assert_close(inductor.moe(**named), reference.moe(**named), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_negative_index_is_refused(tokens):
    named = arguments(tokens=tokens)
    named["top_k_index"][0, 0] = -1
    with torch.no_grad(), pytest.raises(IndexError, match="must not be negative; it has -1"):
        inductor.moe(**named)


def test_a_negative_index_is_an_expert_elsewhere_where_the_host_does_not_look():
    named = arguments()
    index = named["top_k_index"]
    elsewhere = reference.moe(**named | {"top_k_index": index.masked_fill(index == 1, len(named["down"]))})
    assert torch.equal(reference.moe(**named | {"top_k_index": index.masked_fill(index == 1, -1)}), elsewhere)
    assert not torch.equal(reference.moe(**named), elsewhere)


@pytest.mark.parametrize("frozen", ["x", "top_k_weights", "gate_up", "down"])
def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(frozen):
    named = arguments()
    full = dict(zip(("x", "top_k_weights", "gate_up", "down"), run(inductor.moe, named)[1:], strict=True))
    named[frozen] = named[frozen].detach()
    del full[frozen]
    assert_close(run(inductor.moe, named)[1:], list(full.values()), 1e-6)


@pytest.mark.parametrize("listed", [False, True])
def test_it_can_be_differentiated_twice(listed):
    named = arguments(tokens=3, experts=3, hidden=4, inner=3, listed=listed, dtype=torch.float64)
    named["top_k_weights"] = named["top_k_weights"].detach().double().requires_grad_()
    fixed = {name: value for name, value in named.items() if name not in ("x", "top_k_weights")}
    if listed:
        assert torch.autograd.gradgradcheck(
            lambda x, w, g: inductor.moe(x, top_k_weights=w, **{**fixed, "gate_up": [g, *fixed["gate_up"][1:]]}),
            (named["x"], named["top_k_weights"], fixed["gate_up"][0]),
        )
    else:
        del fixed["gate_up"]
        assert torch.autograd.gradgradcheck(
            lambda x, w, g: inductor.moe(x, top_k_weights=w, gate_up=g, **fixed),
            (named["x"], named["top_k_weights"], named["gate_up"]),
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_where_it_is(value):
    named = arguments()
    with torch.no_grad():
        named["x"][3, 1] = value
    y = inductor.moe(**named)
    assert not y[3].isfinite().any()
    assert y[[0, 1, 2, 4, 5, 6]].isfinite().all()


def test_strided_inputs_are_as_good():
    named = arguments()
    expected = run(inductor.moe, named)
    named["x"] = named["x"].detach().repeat_interleave(2, 1)[:, ::2].requires_grad_()
    named["top_k_index"] = named["top_k_index"].t().contiguous().t()
    named["gate_up"] = named["gate_up"].detach().mT.contiguous().mT.requires_grad_()
    assert_close(run(inductor.moe, named), expected, 1e-6)


def test_autocast_changes_nothing():
    named = arguments(tokens=30)
    with torch.autocast("cpu", torch.bfloat16):
        inside = inductor.moe(**named)
    assert torch.equal(inside, inductor.moe(**named))


@pytest.mark.parametrize("way", ["stacked", "as in gpt-oss"])
def test_compiled_around_it_is_one_graph_and_right(way):
    named = arguments(**WAYS[way])
    compiled = torch.compile(inductor.moe, fullgraph=True, backend="aot_eager")
    assert_close(run(compiled, named), run(reference.moe, named), 2e-5)


def test_a_trace_serves_another_routing():
    named, other = arguments(), arguments(seed=1)
    order = ("x", "top_k_index", "top_k_weights", "gate_up", "down")
    traced = torch.jit.trace(inductor.moe, [named[name].detach() for name in order], check_trace=False)
    found = traced(*[other[name].detach() for name in order])
    torch.testing.assert_close(found, reference.moe(**other).detach())


def test_a_functorch_transform_sees_through_it():
    named = arguments()
    fixed = {name: value for name, value in named.items() if name != "x"}
    gradient = torch.func.grad(lambda x: inductor.moe(x, **fixed).sum())(named["x"].detach())
    torch.testing.assert_close(gradient, run(reference.moe, named, torch.ones(7, 12))[1])


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
@pytest.mark.parametrize("function", [reference.moe, inductor.moe])
def test_what_does_not_fit_is_refused_by_name(function, wrong, error, message):
    with pytest.raises(error, match=message):
        function(**{**arguments(), **wrong})


class TestMatmul:
    @pytest.fixture(params=[True, False], autouse=True)
    def faster(self, request, monkeypatch):
        monkeypatch.setattr(matrix_products, "onednn_is_faster", lambda: request.param)

    @pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 5, 7), (3, 1024, 600), (40, 33, 17)])
    def test_is_the_product(self, rows, inner, columns):
        a, b, out = torch.randn(rows, inner), torch.randn(columns, inner).t(), torch.full((rows, columns), torch.nan)
        for left, right in itertools.product((a, a.t().contiguous().t()), (b, b.contiguous())):
            matrix_products.matmul(left, right, out)
            torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_many_groups_at_once_are_the_products_of_each(self, dtype):
        sizes, groups = [1, 3, 2, 4, 1, 1, 2, 2, 3], [0, 2, 3, 4, 5, 7, 8, 9, 11]
        rows, weight = torch.randn(sum(sizes), 16).to(dtype), torch.randn(12, 16, 8).to(dtype)
        found = matrix_products.grouped_matmul(rows, weight, sizes, groups)
        if found is not None:
            expected = [r @ weight[g] for r, g in zip(rows.split(sizes), groups, strict=True)]
            torch.testing.assert_close(found, torch.cat(expected))

    def test_summed_over_their_rows_idle_groups_are_zero(self):
        sizes, groups = [1, 3, 2, 4, 1, 1, 2, 2, 8], [0, 2, 3, 4, 5, 7, 8, 9, 11]
        rows, grad = torch.randn(sum(sizes), 16).bfloat16(), torch.randn(sum(sizes), 8).bfloat16()
        found = matrix_products.grouped_matmul(rows.t(), grad, sizes, groups)
        if found is not None:
            for group in range(12):
                at = groups.index(group) if group in groups else None
                expected = (
                    torch.zeros(16, 8).bfloat16() if at is None else rows.split(sizes)[at].t() @ grad.split(sizes)[at]
                )
                torch.testing.assert_close(found[group], expected)
