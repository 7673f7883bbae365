"""A faster computation of a formula runs its own backward, unless the backward is differentiated again."""

import pytest
import torch

from fuseplug_backends.triton import differentiable, differentiable_linear


@pytest.fixture
def ran():
    return []


@pytest.fixture
def product(ran):
    def forward(power, needs, x, y):
        ran.append(tuple(needs))
        return x.pow(power) * y, (x.pow(power - 1),)

    def backward(power, needs, grad, lower, x, y):
        ran.append("backward")
        gradients = (grad * power * lower * y, grad * lower * x)
        return [gradient for gradient, need in zip(gradients, needs, strict=True) if need]

    return differentiable(forward, backward, lambda power, x, y: x.pow(power) * y)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_gradients_that_are_needed_are_those_of_the_backward(product, ran, needs):
    x, y = (torch.tensor(value).requires_grad_(need) for value, need in zip((2.0, 5.0), needs, strict=True))
    product(3, x, y).backward()
    assert [x.grad, y.grad] == [value if need else None for value, need in zip((60.0, 8.0), needs, strict=True)]
    assert ran == [needs, "backward"]


def test_where_none_is_recorded_only_the_forward_runs(product, ran):
    assert product(3, torch.tensor(2.0), torch.tensor(5.0)) == 40.0
    assert ran == [()]


def test_a_second_derivative_is_that_of_the_formula(product, ran):
    x, y = torch.tensor(2.0, requires_grad=True), torch.tensor(5.0)
    (gradient,) = torch.autograd.grad(product(3, x, y), x, create_graph=True)
    assert (gradient, *torch.autograd.grad(gradient, x)) == (60.0, 60.0)
    assert ran == [(True, False)]


class GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return None, None


@pytest.mark.parametrize(("again", "of_table"), [(False, False), (True, False), (False, True)])
def test_of_results_without_gradients_a_linear_function_gives_none(again, of_table):
    x, y, table = (torch.tensor(value, requires_grad=True) for value in (2.0, 5.0, 3.0))
    table.requires_grad_(of_table)
    scaled = differentiable_linear(
        lambda _, xs, tables: [x * tables[0] for x in xs],
        lambda _, grads, tables, dtypes: [grad * tables[0] for grad in grads if grad is not None],
        lambda _, xs, tables: [x * tables[0] for x in xs],
    )
    loss = GivesNone.apply(*scaled(None, [x, y], [table])) + x
    wanted = [x, y, table][: 3 if of_table else 2]
    gradients = torch.autograd.grad(loss, wanted, create_graph=again, allow_unused=True)
    assert gradients == (1.0, None, None)[: len(wanted)]
