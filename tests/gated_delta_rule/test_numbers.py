"""Gated delta rules on each backend: what tests/recurrences does not check for all recurrences."""

import pytest
import torch
from support.delta_rules import ROWS

every = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@pytest.fixture
def both(backend, row):
    return row.both(backend.module(row.op))


@every
def test_no_decay_and_the_same_key_again_and_again(backend, row, both):
    arguments = row.tensors(shape=(1, 70, 1, 1))
    arguments["g"].zero_()
    arguments["k"] = arguments["k"][:, :1].expand(-1, 70, -1, -1).contiguous()
    backend.assert_right(*both, arguments, row.tolerance)


@every
def test_the_gradient_of_a_decay_of_nothing_is_nothing(backend, row, both):
    leaves = backend.on(row.tensors(shape=(2, 1, 2, 1), optional=False), "g")
    y, state = both[0](**leaves)
    assert not torch.autograd.grad(y.sum() + state.sum(), leaves["g"])[0].any()
