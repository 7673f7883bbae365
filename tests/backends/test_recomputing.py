"""Gradients for operations without a derivative, from a formula."""

import pytest
import torch

from fuseplug_backends.npu import recomputed


class Silent(torch.autograd.Function):
    """An operation that has no derivative and does not say so."""

    @staticmethod
    def forward(ctx, a, b, power):
        ctx.mark_non_differentiable(out := a * b**power)
        return out


def formula(a, b, power):
    return a * b**power


def silent(a, b, power):
    ran.append("op")
    return Silent.apply(a.detach(), b.detach(), power)


ran = []
op = recomputed(silent, formula)


@pytest.fixture(autouse=True)
def _counted():
    ran.clear()


@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_the_formula(wants):
    a, b = (torch.randn(3, 4, dtype=torch.float64).requires_grad_(want) for want in wants)
    grad = torch.randn(3, 4, dtype=torch.float64)
    wanted = [each for each in (a, b) if each.requires_grad]
    found = torch.autograd.grad(op(a, b, 3), wanted, grad)
    assert ran == ["op"]
    for one, other in zip(found, torch.autograd.grad(formula(a, b, 3), wanted, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_without_gradients_it_is_the_operation():
    a = torch.randn(3)
    assert not op(a, a, 2).requires_grad
    with torch.no_grad():
        assert not op(a.requires_grad_(), a, 2).requires_grad
    assert ran == ["op", "op"]


def test_nothing_is_kept_but_the_arguments():
    a, b = torch.randn(5, requires_grad=True), torch.randn(5)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        kept = []
        op(a, b, 2)
    assert [each.data_ptr() for each in kept] == [a.data_ptr(), b.data_ptr()]


def test_one_tensor_as_two_arguments():
    a = torch.randn(3, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(op(a, a, 2).sum(), a)
    torch.testing.assert_close(found, 3 * a**2)


def test_second_derivatives_are_those_of_the_formula():
    a = torch.randn(3, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(op(a, a, 2).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    torch.testing.assert_close(second, 6 * a)


def test_inside_a_compiled_graph_gradients_are_right_too():
    compiled = torch.compile(lambda a, b: op(a, b, 2), backend="aot_eager", fullgraph=True)
    a, b = torch.randn(3, requires_grad=True), torch.randn(3)
    (found,) = torch.autograd.grad(compiled(a, b).sum(), a)
    torch.testing.assert_close(found, b**2)
