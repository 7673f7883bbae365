"""The reference computes the formula and its gradients, and its errors name what does not fit."""

import math

import pytest
import torch
from support.recurrences import BF16, DOUBLE
from support.ssd import tensors

from fuseplug_ssd.reference import ssd


def by_the_book(x, dt, A, B, C, D=None, dt_bias=None, initial_states=None, *, dt_softplus, dt_limit):
    """The formula, one number after the other."""
    (batch, tokens, heads, width), (groups, states) = x.shape, B.shape[2:]
    y = torch.zeros_like(x)
    last = x.new_zeros(batch, heads, width, states) if initial_states is None else initial_states.clone()
    for b in range(batch):
        for head in range(heads):
            group = head * groups // heads
            for t in range(tokens):
                step = float(dt[b, t, head]) + (0.0 if dt_bias is None else float(dt_bias[head]))
                step = math.log1p(math.exp(step)) if dt_softplus else step
                step = min(max(step, dt_limit[0]), dt_limit[1])
                for p in range(width):
                    total = 0.0 if D is None else float(D[head]) * float(x[b, t, head, p])
                    for n in range(states):
                        h = math.exp(step * float(A[head])) * float(last[b, head, p, n])
                        h += step * float(B[b, t, group, n]) * float(x[b, t, head, p])
                        last[b, head, p, n] = h
                        total += h * float(C[b, t, group, n])
                    y[b, t, head, p] = total
    return y, last


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize(("softplus", "limit"), [(True, (0.0, math.inf)), (False, (0.3, 1.0))])
def test_it_is_the_formula_in_float64(optional, softplus, limit):
    arguments = {name: t.double() for name, t in tensors(shape=(2, 5, 4, 3), optional=optional).items()}
    found = ssd(**arguments, dt_softplus=softplus, dt_limit=limit)
    torch.testing.assert_close(found, by_the_book(**arguments, dt_softplus=softplus, dt_limit=limit))


def test_its_gradients_are_those_of_the_function():
    arguments = [t.double().requires_grad_() for t in tensors(shape=(1, 3, 2, 2), groups=1, states=2).values()]
    assert torch.autograd.gradcheck(lambda *args: ssd(*args, dt_softplus=True), arguments)


def test_half_precision_is_computed_in_float32():
    arguments = tensors(BF16, BF16)
    y, state = ssd(**arguments)
    wide = ssd(**{name: t.float() for name, t in arguments.items()})
    assert y.dtype is state.dtype is torch.float32
    assert torch.equal(y, wide[0])
    assert ssd(**arguments | {"A": arguments["A"].double()})[1].dtype is DOUBLE


def test_no_tokens_leave_the_states_as_they_were():
    arguments = tensors(shape=(2, 0, 4, 3))
    y, state = ssd(**arguments)
    assert y.shape == (2, 0, 4, 3)
    assert torch.equal(state, arguments["initial_states"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"x": torch.ones(2, 5)}, r"x and B have shapes \(2, 5\) and \(2, 37, 2, 3\); \(batch, tokens, heads, width\)"),
        ({"B": torch.ones(2, 37, 3)}, r"x and B have shapes .* and \(2, 37, 3\)"),
        ({"B": torch.ones(2, 37, 3, 3)}, "4 heads cannot share the B and C of 3 groups"),
        ({"A": torch.ones(4, 3)}, r"A has shape \(4, 3\); \(4,\) is expected"),
        ({"dt": torch.ones(2, 1, 4)}, r"dt has shape \(2, 1, 4\); \(2, 37, 4\) is expected"),
        ({"C": torch.ones(1, 37, 2, 3)}, r"C has shape \(1, 37, 2, 3\)"),
        ({"D": torch.ones(4, 3)}, r"D has shape \(4, 3\); \(4,\) is expected"),
        ({"dt_bias": torch.ones(1)}, r"dt_bias has shape \(1,\)"),
        ({"initial_states": torch.ones(2, 4, 3)}, r"initial_states has shape .*; \(2, 4, 3, 3\) is expected"),
    ],
)
def test_what_does_not_fit_is_said(changes, why):
    with pytest.raises(ValueError, match=why):
        ssd(**tensors() | changes)
