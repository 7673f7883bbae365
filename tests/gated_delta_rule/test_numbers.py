"""Gated delta rules by each backend: values and gradients, layouts, dtypes, and what is left to the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.delta_rules import BF16, DOUBLE, HALF, SINGLE, TOLERANCE, both, tensors
from support.thorough import covering

from fuseplug_gated_delta_rule.reference import VARIANTS

DTYPES = [(SINGLE, SINGLE), (BF16, SINGLE), (HALF, SINGLE), (BF16, BF16)]
SHAPES = [(2, 21, 2, 2), (1, 1, 1, 1), (2, 64, 1, 3), (1, 65, 2, 1), (3, 150, 2, 3)]
"""Batch, tokens, key heads and heads of each: less than a chunk, one, one and a token, two segments of several."""


@pytest.fixture
def kernel(backend):
    return backend.module("gated_delta_rule")


@pytest.mark.parametrize(
    ("variant", "dtypes", "shape", "normalised", "state"),
    covering(itertools.product(VARIANTS, DTYPES, SHAPES, [True, False], [True, False])),
    ids=str,
)
def test_every_variant_shape_and_mix_of_dtypes(backend, kernel, variant, dtypes, shape, normalised, state):
    arguments = tensors(variant, *dtypes, shape=shape, state=state)
    backend.assert_right(*both(kernel, variant, normalised=normalised), arguments, TOLERANCE)


VIEWS = {
    "a part of the channels": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels before heads": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "one batch again and again": lambda x: x[:1].expand(2, *[-1] * (x.dim() - 1)),
    "not aligned": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_layout(backend, kernel, view):
    def seen(function):
        return lambda q, k, v, g, beta, initial_state: function(*map(VIEWS[view], (q, k, v, g, beta, initial_state)))

    backend.assert_right(*map(seen, both(kernel, "channel")), tensors("channel"), TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("least", [-90.0, -1e4, -1e30])
def test_decays_as_strong_as_can_be(backend, kernel, variant, least):
    arguments = tensors(variant, shape=(1, 70, 1, 1))
    arguments["g"][:, 3::9] = least
    backend.assert_right(*both(kernel, variant), arguments, TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_decay_and_the_same_key_again_and_again(backend, kernel, variant):
    arguments = tensors(variant, shape=(1, 70, 1, 1))
    arguments["g"].zero_()
    arguments["k"] = arguments["k"][:, :1].expand(-1, 70, -1, -1).contiguous()
    backend.assert_right(*both(kernel, variant), arguments, TOLERANCE)


def test_the_gradient_of_a_decay_of_nothing_is_nothing(backend, kernel):
    for variant in VARIANTS:
        leaves = backend.on(tensors(variant, shape=(2, 1, 2, 1), state=False), "g")
        y, state = both(kernel, variant)[0](**leaves)
        assert not torch.autograd.grad(y.sum() + state.sum(), leaves["g"])[0].any()


@pytest.mark.parametrize("wanted", [("k",), ("g", "initial_state"), ("v", "beta")], ids=str)
@pytest.mark.parametrize("used", [0, 1])
def test_only_the_gradients_that_are_wanted_of_the_result_that_is_used(backend, kernel, wanted, used):
    found, expected = (
        torch.autograd.grad(
            function(**leaves)[used].square().sum(), [leaves[name] for name in wanted], allow_unused=True
        )
        for function, leaves in zip(both(kernel), (backend.on(tensors(), *wanted), _leaves(wanted)), strict=True)
    )
    for name, one, other in zip(wanted, found, expected, strict=True):
        if other is None:
            assert one is None or not one.any(), name
        else:
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


def _leaves(wanted):
    return {name: t.detach().clone().requires_grad_(name in wanted) for name, t in tensors().items()}


def test_a_second_derivative(backend, kernel):
    if not backend.differentiable_twice:
        pytest.skip("the operations have none, and say so")
    arguments = [t.to(DOUBLE) for t in tensors("channel", shape=(1, 3, 1, 1), channels=(3, 2)).values()]
    leaves = [t.to(backend.device).requires_grad_() for t in arguments]
    function = both(kernel, "channel", normalised=True)[0]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_transforms_of_torch_func(backend, kernel):
    ours, theirs = both(kernel)
    arguments, moved = list(tensors().values()), list(backend.on(tensors()).values())

    def penalty(function):
        return torch.func.grad(lambda *args: function(*args)[0].square().sum())

    torch.testing.assert_close(penalty(ours)(*moved).cpu(), penalty(theirs)(*arguments), rtol=1e-4, atol=1e-5)


def test_under_autocast_it_computes_in_float32(backend, kernel):
    ours = both(kernel)[0]
    plain = backend.on(tensors(), "q", "v")
    expected = torch.autograd.grad(ours(**plain)[0].sum(), [plain["q"], plain["v"]])
    with torch.autocast(backend.device, torch.bfloat16):
        y, _ = ours(**plain)
        found = torch.autograd.grad(y.sum(), [plain["q"], plain["v"]])
    assert all(map(torch.equal, found, expected))
    assert torch.equal(y, ours(**plain)[0])


def test_what_is_empty_is_the_references(backend, kernel):
    ours, theirs = both(kernel)
    arguments = tensors(shape=(2, 0, 2, 2))
    for found, expected in zip(ours(**backend.on(arguments)), theirs(**arguments), strict=True):
        assert torch.equal(found.cpu(), expected)
