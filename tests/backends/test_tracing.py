"""Whatever observes a function (a tracer, transform, mode or hook) is recognised, with the installed torch."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook

from fuseplug_backends import tracing

X = torch.arange(1.0, 7.0).view(2, 3)


def in_forward_mode(function):
    with forward_ad.dual_level():
        function(X)


def in_a_mode(function):
    with FakeTensorMode():
        function(torch.ones(2))


WITHIN = {
    "alone": lambda f: f(X),
    "trace": lambda f: torch.jit.trace(f, (X,), check_trace=False),
    "compile": lambda f: torch.compile(f, backend="eager", fullgraph=True)(X),
    "vmap": lambda f: torch.func.vmap(f)(X),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(X),
    "forward mode": in_forward_mode,
    "mode": in_a_mode,
}
"""Ways to call a function of one tensor: alone, or within a tracer, a transform or a mode."""


@pytest.mark.parametrize(
    ("ask", "where"),
    [
        (lambda x: tracing.is_traced(), {"trace", "compile"}),
        (lambda x: tracing.is_transformed(), {"vmap", "grad", "jvp", "vmap of grad", "forward mode"}),
        (lambda x: tracing.is_watched(), WITHIN.keys() - {"alone"}),
        (tracing.is_wrapped, {"vmap", "grad", "jvp", "vmap of grad"}),
        (tracing.is_mapped, {"vmap", "vmap of grad"}),
        (tracing.is_fake, {"mode"}),
    ],
    ids=["traced", "transformed", "watched", "wrapped", "mapped", "fake"],
)
def test_each_is_seen_where_it_is_and_nowhere_else(ask, where):
    def is_seen(within):
        torch.compiler.reset()
        answers = []

        def function(x):
            answers.append(ask(x))
            return x * 1

        within(function)
        return answers[-1]

    # Inside Dynamo, traced tensors are plain ones, and nothing is asked about them.
    about_tensors = ask in (tracing.is_wrapped, tracing.is_mapped, tracing.is_fake)
    asked = WITHIN.keys() - {"compile"} if about_tensors else WITHIN.keys()
    assert {name for name in asked if is_seen(WITHIN[name])} == where


def test_a_batch_of_gradients_is_seen():
    answers = []
    y = X.clone().requires_grad_() * 1
    y.register_hook(lambda grad: answers.append(tracing.is_batch_of_gradients(grad)))
    y.sum().backward(retain_graph=True)
    torch.autograd.grad(y, y.grad_fn.next_functions[0][0].variable, torch.ones(4, 2, 3), is_grads_batched=True)
    assert answers == [False, True]


def test_hooks_for_all_modules_are_seen_while_they_are_there():
    assert not tracing.are_modules_hooked()
    handle = register_module_forward_hook(lambda *_: None)
    assert tracing.are_modules_hooked()
    handle.remove()
    nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    assert not tracing.are_modules_hooked()
