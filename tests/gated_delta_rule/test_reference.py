"""The reference computes the formula and its gradients, and its errors name what does not fit."""

import pytest
import torch
from support.delta_rules import tensors
from support.recurrences import BF16, DOUBLE

from fuseplug_gated_delta_rule.reference import VARIANTS, gated_delta_rule


def by_the_book(q, k, v, g, beta, initial_state=None, *, normalised):
    """The formula with matrices, one token of one head after the other."""
    batch, tokens, heads, values = v.shape
    keys, repeats = q.shape[3], heads // q.shape[2]
    y = torch.zeros_like(v)
    states = torch.zeros(batch, heads, keys, values, dtype=v.dtype)
    if initial_state is not None:
        states += initial_state
    for b in range(batch):
        for h in range(heads):
            state = states[b, h].clone()
            for t in range(tokens):
                query, key = q[b, t, h // repeats], k[b, t, h // repeats]
                if normalised:
                    query, key = (x / (x @ x + 1e-6).sqrt() for x in (query, key))
                state = torch.diag(g[b, t, h].exp().expand(keys)) @ state
                state = state + beta[b, t, h] * torch.outer(key, v[b, t, h] - key @ state)
                y[b, t, h] = query @ state / keys**0.5
            states[b, h] = state
    return y, states


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("shape", "state", "normalised"),
    [((2, 5, 1, 2), True, False), ((1, 1, 2, 1), False, True), ((1, 7, 1, 1), True, True)],
)
def test_it_is_the_formula_in_float64(variant, shape, state, normalised):
    arguments = {n: t.double() for n, t in tensors(variant, shape=shape, optional=state).items()}
    found = gated_delta_rule(**arguments, variant=variant, normalised=normalised)
    expected = by_the_book(**arguments, normalised=normalised)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_gradients_are_those_of_the_function(variant):
    arguments = [t.double().requires_grad_() for t in tensors(variant, shape=(1, 3, 1, 2), channels=(3, 2)).values()]
    assert torch.autograd.gradcheck(lambda *args: gated_delta_rule(*args, variant=variant, normalised=True), arguments)


def test_half_precision_is_computed_in_float32_and_rounded_once():
    arguments = tensors(dtype=BF16)
    y, state = gated_delta_rule(**arguments)
    wide, _ = gated_delta_rule(**{name: t.float() for name, t in arguments.items()})
    assert torch.equal(y, wide.to(BF16))
    assert state.dtype is torch.float32
    assert gated_delta_rule(**{name: t.to(DOUBLE) for name, t in arguments.items()})[1].dtype is DOUBLE


@pytest.mark.parametrize("state", [True, False])
def test_no_tokens_leave_the_state(state):
    arguments = tensors(shape=(2, 0, 2, 2), optional=state)
    y, after = gated_delta_rule(**arguments)
    assert y.shape == (2, 0, 4, 5)
    assert torch.equal(after, arguments.get("initial_state", torch.zeros(2, 4, 6, 5)))
    assert after is not arguments.get("initial_state")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"variant": "token"}, "unknown variant of the gated delta rule 'token'; known: head, channel"),
        ({"q": torch.ones(2, 21, 6)}, r"q and v have shapes \(2, 21, 6\) and"),
        ({"v": torch.ones(2, 21, 3, 5)}, "v has 3 heads, and q 2: a multiple is expected"),
        ({"k": torch.ones(2, 21, 2, 5)}, r"k has shape \(2, 21, 2, 5\); \(2, 21, 2, 6\) is expected"),
        ({"variant": "channel"}, r"g has shape \(2, 21, 4\); \(2, 21, 4, 6\) is expected"),
        ({"beta": torch.ones(2, 21, 2)}, r"beta has shape \(2, 21, 2\)"),
        ({"initial_state": torch.ones(2, 4, 5, 6)}, r"initial_state has shape \(2, 4, 5, 6\); \(2, 4, 6, 5\)"),
    ],
)
def test_what_does_not_fit_is_said(changes, why):
    with pytest.raises(ValueError, match=why):
        gated_delta_rule(**tensors() | changes)
