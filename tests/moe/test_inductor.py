"""What is specific to the mixture of experts in Inductor: one token, tracers, and its matrix products."""

import itertools

import pytest
import torch
from support.mixtures import HALF, WAYS, arguments, assert_close

from fuseplug_moe import reference
from fuseplug_moe.backends import inductor
from fuseplug_moe.backends.inductor import matrix_products


@pytest.mark.parametrize("way", WAYS)
def test_one_token_without_gradients_is_the_same(way):
    named = arguments(**WAYS[way] | {"tokens": 1})
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


def test_a_negative_index_is_refused_for_one_token_too():
    named = arguments(tokens=1)
    named["top_k_index"][0, 0] = -1
    with torch.no_grad(), pytest.raises(IndexError, match="must not be negative; it has -1"):
        inductor.moe(**named)


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


def without_gradients(named, *names):
    for name in names:
        values = named.get(name)
        for tensor in values if isinstance(values, list) else [values] if values is not None else []:
            tensor.requires_grad_(False)
    return named


@pytest.mark.parametrize("listed", [False, True])
def test_frozen_experts_keep_no_rows(listed):
    named = without_gradients(arguments(hidden=16, listed=listed), "gate_up", "up", "down")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = inductor.moe(**named)
    assert (named["top_k_index"].numel(), 16) not in [tuple(tensor.shape) for tensor in saved]
    wanted = [named["x"], named["top_k_weights"]]
    twice = []
    for function in (lambda **_: y, reference.moe):
        first = torch.autograd.grad(function(**named).square().sum(), wanted, create_graph=True)
        twice.append([*first, *torch.autograd.grad(sum(each.square().sum() for each in first), wanted)])
    torch.testing.assert_close(*twice, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("listed", [False, True])
def test_the_first_matrices_may_be_written_into_if_x_needs_no_gradient(listed):
    named = without_gradients(arguments(listed=listed), "x")
    wanted = named["gate_up"] if listed else [named["gate_up"]]
    expected = torch.autograd.grad(reference.moe(**named).sum(), wanted)
    y = inductor.moe(**named)
    with torch.no_grad():
        for matrix in wanted:
            matrix.zero_()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), wanted), expected, rtol=1e-4, atol=1e-5)


def test_a_trace_serves_another_routing():
    named, other = arguments(), arguments(seed=1)
    order = ("x", "top_k_index", "top_k_weights", "gate_up", "down")
    traced = torch.jit.trace(inductor.moe, [named[name].detach() for name in order], check_trace=False)
    found = traced(*[other[name].detach() for name in order])
    torch.testing.assert_close(found, reference.moe(**other).detach())


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
