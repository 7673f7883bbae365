"""Mamba-2's recurrence on each backend: what tests/recurrences does not check for all recurrences."""

import pytest
import torch
from support.ssd import ROW, tensors


@pytest.fixture
def both(backend):
    return ROW.both(backend.module("ssd"))


def test_what_a_strong_decay_leaves_of_the_next_tokens_is_exact(backend, both):
    """So large a sum of logarithms has no digits left for the logarithms of the tokens that follow."""
    arguments = tensors(shape=(1, 60, 4, 2))
    arguments["dt"][:, 3], arguments["x"][:, 3] = 1e30, 0.0
    backend.assert_right(*both, arguments, ROW.tolerance)


@pytest.mark.parametrize("name", ["x", "initial_states"])
def test_a_step_in_any_layout(backend, both, name):
    arguments = {of: t.to(backend.device) for of, t in tensors(shape=(3, 1, 4, 2)).items()}
    arguments[name] = arguments[name].mT.contiguous().mT
    torch.testing.assert_close(*(function(**arguments) for function in both), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C"])
def test_what_is_not_finite_leaves_no_result_finite_that_the_references_is_not(both, name, value):
    arguments = tensors(shape=(1, 70, 4, 2))
    arguments[name][(0,) * arguments[name].dim()] = value
    (y, state), (expected, of_states) = (function(**arguments) for function in both)
    assert not expected.isfinite().all()
    for result, other in ((y, expected), (state, of_states)):
        assert not (result.isfinite() & ~other.isfinite()).any()
    # The heads of other groups are not affected.
    assert y[:, :, 2:].isfinite().all()
