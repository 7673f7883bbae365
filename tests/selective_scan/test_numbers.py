"""Selective scans by each backend: values and gradients, layouts, dtypes, and what is left to the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.scans import BF16, DOUBLE, HALF, SINGLE, TOLERANCE, both, tensors
from support.thorough import covering

DTYPES = [(SINGLE, SINGLE), (BF16, SINGLE), (HALF, SINGLE), (BF16, BF16)]
SHAPES = [(2, 5, 21), (1, 1, 1), (2, 3, 32), (1, 7, 33), (3, 20, 70)]
"""Batch, channels and tokens: less than a chunk, one token, one chunk, one and a token, three."""


@pytest.fixture
def kernel(backend):
    return backend.module("selective_scan")


@pytest.mark.parametrize(
    ("dtypes", "shape", "softplus", "optional"),
    covering(itertools.product(DTYPES, SHAPES, [True, False], [True, False])),
    ids=str,
)
def test_every_shape_and_mix_of_dtypes(backend, kernel, dtypes, shape, softplus, optional):
    arguments = tensors(*dtypes, shape=shape, optional=optional)
    backend.assert_right(*both(kernel, delta_softplus=softplus), arguments, TOLERANCE)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("missing", [None, "D", "z", "delta_bias", "initial_state"])
def test_a_step_of_decoding(backend, kernel, dtypes, missing):
    arguments = tensors(*dtypes, shape=(3, 7, 1))
    arguments.pop(missing, None)
    ours, theirs = both(kernel, delta_softplus=True)
    for found, expected in zip(ours(**backend.on(arguments)), theirs(**arguments), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("missing", ["D", "z", "delta_bias", "initial_state"])
def test_without_one_that_may_be_missing(backend, kernel, missing):
    arguments = tensors()
    del arguments[missing]
    backend.assert_right(*both(kernel, delta_softplus=True), arguments, TOLERANCE)


VIEWS = {
    "a part of the last dimension": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "the other way round": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "tokens side by side": lambda x: x.contiguous(),
    "every second": lambda x: torch.stack((x, x), -1)[..., 0],
    "not aligned": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_layout(backend, kernel, view):
    def seen(function):
        return lambda **arguments: function(**{name: VIEWS[view](t) for name, t in arguments.items()})

    backend.assert_right(*map(seen, both(kernel, delta_softplus=True)), tensors(), TOLERANCE)


def test_one_sequence_again_and_again(backend, kernel):
    def expanded(function):
        return lambda **arguments: function(
            **{name: t[:1].expand_as(t) if t.dim() == 3 else t for name, t in arguments.items()}
        )

    backend.assert_right(*map(expanded, both(kernel)), tensors(), TOLERANCE)


@pytest.mark.parametrize("least", [-1e-6, -90.0, -1e4, -1e30])
def test_decays_as_weak_and_as_strong_as_can_be(backend, kernel, least):
    arguments = tensors(shape=(1, 2, 40))
    arguments["A"][:, 1] = least
    backend.assert_right(*both(kernel), arguments, TOLERANCE)


def test_states_that_grow(backend, kernel):
    arguments = tensors(shape=(1, 2, 40))
    arguments["A"] = arguments["A"].abs() / 8
    backend.assert_right(*both(kernel), arguments, TOLERANCE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "z"])
def test_what_is_not_finite_is_not_finite_where_the_references_is(backend, kernel, name, value):
    arguments = tensors()
    arguments[name].select(-1, 1)[0] = value
    found, expected = (function(**arguments) for function in both(kernel, delta_softplus=True))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
    assert not expected[0].isfinite().all()


@pytest.mark.parametrize("wanted", [("B",), ("A", "D"), ("dt", "delta_bias"), ("x", "C", "z")], ids=str)
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
    leaves = [t.to(backend.device, DOUBLE).requires_grad_() for t in tensors(shape=(1, 2, 3), states=2).values()]
    function = both(kernel, delta_softplus=True)[0]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_transforms_of_torch_func(backend, kernel):
    ours, theirs = both(kernel, delta_softplus=True)
    arguments, moved = list(tensors().values()), list(backend.on(tensors()).values())

    def penalty(function):
        return torch.func.grad(lambda *args: function(*args)[0].square().sum())

    torch.testing.assert_close(penalty(ours)(*moved).cpu(), penalty(theirs)(*arguments), rtol=1e-4, atol=1e-4)


def test_under_autocast_it_computes_in_float32(backend, kernel):
    ours = both(kernel, delta_softplus=True)[0]
    plain = backend.on(tensors(), "x", "C")
    expected = torch.autograd.grad(ours(**plain)[0].sum(), [plain["x"], plain["C"]])
    with torch.autocast(backend.device, torch.bfloat16):
        y, _ = ours(**plain)
        found = torch.autograd.grad(y.sum(), [plain["x"], plain["C"]])
    assert all(map(torch.equal, found, expected))
    assert torch.equal(y, ours(**plain)[0])


def test_what_is_empty_is_the_references(backend, kernel):
    ours, theirs = both(kernel)
    for shape in ((2, 5, 0), (0, 5, 3)):
        arguments = tensors(shape=shape)
        for found, expected in zip(ours(**backend.on(arguments)), theirs(**arguments), strict=True):
            assert torch.equal(found.cpu(), expected)
