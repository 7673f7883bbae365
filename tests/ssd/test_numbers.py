"""Mamba-2's recurrence by each backend: values and gradients, layouts, dtypes, and what is left to the reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.ssd import BF16, DOUBLE, HALF, SINGLE, TOLERANCE, both, tensors
from support.thorough import covering

DTYPES = [(SINGLE, SINGLE), (BF16, SINGLE), (HALF, SINGLE), (BF16, BF16)]
SHAPES = [((2, 21, 4, 3), 2), ((1, 1, 1, 1), 1), ((2, 64, 2, 3), 2), ((1, 65, 6, 7), 1), ((3, 150, 6, 2), 3)]
"""Less than a chunk, one token, one chunk, one and a token, three; with the number of groups."""


@pytest.fixture
def kernel(backend):
    return backend.module("ssd")


@pytest.mark.parametrize(
    ("dtypes", "shape", "softplus", "optional"),
    covering(itertools.product(DTYPES, SHAPES, [True, False], [True, False])),
    ids=str,
)
def test_every_shape_and_mix_of_dtypes(backend, kernel, dtypes, shape, softplus, optional):
    arguments = tensors(*dtypes, shape=shape[0], groups=shape[1], optional=optional)
    backend.assert_right(*both(kernel, dt_softplus=softplus), arguments, TOLERANCE)


@pytest.mark.parametrize("missing", ["D", "dt_bias", "initial_states"])
def test_without_one_that_may_be_missing(backend, kernel, missing):
    arguments = tensors()
    del arguments[missing]
    backend.assert_right(*both(kernel, dt_softplus=True), arguments, TOLERANCE)


@pytest.mark.parametrize("limit", [(0.5, 1.0), (0.0, 0.1), (-math.inf, math.inf)])
def test_steps_that_are_limited(backend, kernel, limit):
    backend.assert_right(*both(kernel, dt_softplus=True, dt_limit=limit), tensors(), TOLERANCE)


VIEWS = {
    "a part of the last dimension": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "the other way round": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "contiguous": lambda x: x.contiguous(),
    "not aligned": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    "one sequence again and again": lambda x: x[:1].expand_as(x) if x.dim() > 1 else x,
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_layout(backend, kernel, view):
    def seen(function):
        return lambda **arguments: function(**{name: VIEWS[view](t) for name, t in arguments.items()})

    backend.assert_right(*map(seen, both(kernel, dt_softplus=True)), tensors(), TOLERANCE)


@pytest.mark.parametrize("A", [-1e-6, -90.0, -1e4, -1e30, 0.1])
def test_decays_as_weak_and_as_strong_as_can_be_and_states_that_grow(backend, kernel, A):
    arguments = tensors(shape=(1, 70, 4, 2))
    arguments["A"][1] = A
    backend.assert_right(*both(kernel), arguments, TOLERANCE)


def test_what_a_strong_decay_leaves_of_the_next_tokens_is_exact(backend, kernel):
    """The sum of the logarithms has no digits left for those of the tokens that follow."""
    arguments = tensors(shape=(1, 60, 4, 2))
    arguments["dt"][:, 3], arguments["x"][:, 3] = 1e30, 0.0
    backend.assert_right(*both(kernel), arguments, TOLERANCE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C"])
def test_what_is_not_finite_leaves_no_result_finite_that_the_references_is_not(backend, kernel, name, value):
    arguments = tensors(shape=(1, 70, 4, 2))
    arguments[name][(0,) * arguments[name].dim()] = value
    (y, state), (expected, of_states) = (function(**arguments) for function in both(kernel, dt_softplus=True))
    assert not expected.isfinite().all()
    for found, other in ((y, expected), (state, of_states)):
        assert not (found.isfinite() & ~other.isfinite()).any()
    # The other heads of other groups have nothing of it.
    assert y[:, :, 2:].isfinite().all()


@pytest.mark.parametrize("wanted", [("B",), ("A", "D"), ("dt", "dt_bias"), ("x", "C", "initial_states")], ids=str)
@pytest.mark.parametrize("used", [0, 1])
def test_only_the_gradients_that_are_wanted_of_the_result_that_is_used(backend, kernel, wanted, used):
    leaves = {name: t.detach().clone().requires_grad_(name in wanted) for name, t in tensors().items()}
    found, expected = (
        torch.autograd.grad(
            function(**arguments)[used].square().sum(), [arguments[name] for name in wanted], allow_unused=True
        )
        for function, arguments in zip(both(kernel), (backend.on(tensors(), *wanted), leaves), strict=True)
    )
    for name, one, other in zip(wanted, found, expected, strict=True):
        if other is None:
            assert one is None or not one.any(), name
        else:
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


def test_a_second_derivative(backend, kernel):
    if not backend.differentiable_twice:
        pytest.skip("the operations have none, and say so")
    arguments = tensors(shape=(1, 3, 2, 1), groups=1, states=2)
    leaves = [t.to(backend.device, DOUBLE).requires_grad_() for t in arguments.values()]
    function = both(kernel, dt_softplus=True)[0]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_under_autocast_it_computes_in_float32(backend, kernel):
    ours = both(kernel, dt_softplus=True)[0]
    plain = backend.on(tensors(), "x", "C")
    expected = torch.autograd.grad(ours(**plain)[0].sum(), [plain["x"], plain["C"]])
    with torch.autocast(backend.device, torch.bfloat16):
        y, _ = ours(**plain)
        found = torch.autograd.grad(y.sum(), [plain["x"], plain["C"]])
    assert all(map(torch.equal, found, expected))
    assert torch.equal(y, ours(**plain)[0])


def test_what_is_empty_is_the_references(backend, kernel):
    ours, theirs = both(kernel)
    for shape in ((2, 0, 4, 3), (0, 5, 4, 3)):
        arguments = tensors(shape=shape)
        for found, expected in zip(ours(**backend.on(arguments)), theirs(**arguments), strict=True):
            assert torch.equal(found.cpu(), expected)
