"""The reference computes the formula and its gradients, and its errors name what does not fit."""

import math

import pytest
import torch
from support.recurrences import BF16, DOUBLE
from support.scans import tensors

from fuseplug_selective_scan.reference import selective_scan


def by_the_book(x, dt, A, B, C, D=None, z=None, delta_bias=None, initial_state=None, *, delta_softplus):
    """The formula, one number after the other."""
    (batch, channels, tokens), states = x.shape, A.shape[1]
    y, last = torch.zeros_like(x), x.new_zeros(batch, channels, states)
    for b in range(batch):
        for c in range(channels):
            h = [0.0] * states if initial_state is None else initial_state[b, c].tolist()
            for t in range(tokens):
                step = float(dt[b, c, t]) + (0.0 if delta_bias is None else float(delta_bias[c]))
                step = math.log1p(math.exp(step)) if delta_softplus else step
                for n in range(states):
                    h[n] = math.exp(step * float(A[c, n])) * h[n] + step * float(B[b, n, t]) * float(x[b, c, t])
                total = sum(h[n] * float(C[b, n, t]) for n in range(states))
                total += 0.0 if D is None else float(D[c]) * float(x[b, c, t])
                gate = 1.0 if z is None else float(z[b, c, t]) / (1 + math.exp(-float(z[b, c, t])))
                y[b, c, t] = total * gate
            last[b, c] = torch.tensor(h)
    return y, last


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("softplus", [True, False])
def test_it_is_the_formula_in_float64(optional, softplus):
    arguments = {name: t.double() for name, t in tensors(shape=(2, 3, 5), optional=optional).items()}
    found = selective_scan(**arguments, delta_softplus=softplus)
    torch.testing.assert_close(found, by_the_book(**arguments, delta_softplus=softplus), rtol=1e-6, atol=1e-6)


def test_its_gradients_are_those_of_the_function():
    arguments = [t.double().requires_grad_() for t in tensors(shape=(2, 2, 3), states=2).values()]
    assert torch.autograd.gradcheck(lambda *args: selective_scan(*args, delta_softplus=True), arguments)


@pytest.mark.parametrize("optional", [True, False])
def test_half_precision_is_computed_in_float32_and_rounded_once(optional):
    arguments = tensors(BF16, BF16, optional=optional)
    y, state = selective_scan(**arguments)
    wide, wide_state = selective_scan(**{name: t.float() for name, t in arguments.items()})
    assert torch.equal(y, wide.to(BF16))
    assert torch.equal(state, wide_state)
    assert selective_scan(**{name: t.to(DOUBLE) for name, t in arguments.items()})[1].dtype is DOUBLE


def test_a_skip_in_float32_widens_the_result():
    arguments = tensors(BF16)
    assert selective_scan(**arguments)[0].dtype is torch.float32
    assert selective_scan(**arguments | {"D": None})[0].dtype is BF16


def test_no_tokens_leave_a_state_of_zeros():
    y, state = selective_scan(**tensors(shape=(2, 5, 0), optional=False))
    assert y.shape == (2, 5, 0)
    assert torch.equal(state, torch.zeros(2, 5, 3))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"x": torch.ones(2, 5)}, r"x and A have shapes \(2, 5\) and \(5, 3\); \(batch, channels, tokens\) and"),
        ({"A": torch.ones(5)}, r"x and A have shapes .* and \(5,\)"),
        ({"A": torch.ones(4, 3)}, r"A has shape \(4, 3\); \(5, 3\) is expected"),
        ({"dt": torch.ones(2, 1, 37)}, r"dt has shape \(2, 1, 37\); \(2, 5, 37\) is expected"),
        ({"B": torch.ones(2, 1, 3, 37)}, r"B has shape \(2, 1, 3, 37\); \(2, 3, 37\) is expected"),
        ({"C": torch.ones(1, 3, 37)}, r"C has shape \(1, 3, 37\)"),
        ({"D": torch.ones(5, 1)}, r"D has shape \(5, 1\); \(5,\) is expected"),
        ({"z": torch.ones(2, 5, 1)}, r"z has shape \(2, 5, 1\)"),
        ({"delta_bias": torch.ones(1)}, r"delta_bias has shape \(1,\)"),
        ({"initial_state": torch.ones(2, 3, 5)}, r"initial_state has shape \(2, 3, 5\); \(2, 5, 3\) is expected"),
    ],
)
def test_what_does_not_fit_is_said(changes, why):
    with pytest.raises(ValueError, match=why):
        selective_scan(**tensors() | changes)
