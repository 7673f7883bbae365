"""Second derivatives that an operation lacks are refused, and nothing else is."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fuseplug_backends.npu import first_order


def op(x):
    return first_order(x.sin(), "npu_sin")


def test_a_first_derivative_is_as_it_was():
    x = torch.randn(3, requires_grad=True)
    op(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_a_second_one_is_refused():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"npu_sin of torch_npu has no second derivative: .* undo\(\) its kernel"):
        torch.autograd.grad(op(x).sum(), x, create_graph=True)


def test_one_that_does_not_lead_through_it_is_not():
    x, other = (torch.randn(3, requires_grad=True) for _ in range(2))
    (gradient,) = torch.autograd.grad((op(x).detach() * other**3).sum(), other, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_inside_a_backward_is_no_second_derivative(reentrant):
    x = torch.randn(3, requires_grad=True)
    checkpoint(op, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_without_gradients_there_is_nothing_to_refuse():
    x = torch.randn(3)
    assert torch.equal(op(x), x.sin())
    assert torch.equal(torch.compile(op, backend="aot_eager", fullgraph=True)(x), x.sin())


def test_inside_torch_compile_the_compiler_refuses():
    x = torch.randn(3, requires_grad=True)
    y = torch.compile(op, backend="aot_eager", fullgraph=True)(x)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum(), x)


def test_nothing_is_kept():
    x = torch.randn(3, requires_grad=True)
    y = op(x)
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None
