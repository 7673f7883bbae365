"""The selective scan in chunks: which calls are computed in chunks, and that any cut gives the same."""

import pytest
from support.scans import ROW, tensors

from fuseplug_selective_scan.backends import inductor


@pytest.fixture
def in_chunks(monkeypatch):
    """The shape of x in each chunk that is computed."""
    computed = []

    class Chunk(inductor.Chunk):
        def __init__(self, delta_softplus, inputs, state):
            super().__init__(delta_softplus, inputs, state)
            computed.append(tuple(inputs.x.shape))

    monkeypatch.setattr(inductor, "Chunk", Chunk)
    return computed


@pytest.mark.parametrize(
    ("at_once", "batch", "channels"),
    [(1, [1, 1, 1], [1] * 5), (400, [1, 1, 1], [4, 1]), (1000, [2, 1], [5]), (1 << 18, [3], [5])],
)
def test_parts_of_any_size_give_the_same(in_chunks, backend, monkeypatch, at_once, batch, channels):
    monkeypatch.setattr(inductor, "_AT_ONCE", at_once)
    arguments = tensors(shape=(3, 5, 70))
    backend.assert_right(*ROW.both(inductor), arguments, ROW.tolerance)
    parts = [(some, few) for some in batch for few in channels]
    forward = [(*part, tokens) for part in parts for tokens in (32, 32, 6)]
    assert in_chunks == [*forward, *((*part, tokens) for part in parts for tokens in (6, 32, 32))]
