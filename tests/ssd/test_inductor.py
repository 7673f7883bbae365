"""Mamba-2's recurrence in chunks: which calls are computed in chunks, and that any cut gives the same."""

import pytest
from support.ssd import ROW, tensors

from fuseplug_ssd.backends import inductor


@pytest.fixture
def in_chunks(monkeypatch):
    """The batch size and the number of tokens of each chunk that is computed."""
    computed = []

    def decay(segment, logarithms):
        computed.append((segment.batch, segment.tokens))
        own(segment, logarithms)

    own = inductor.Segment._decay
    monkeypatch.setattr(inductor.Segment, "_decay", decay)
    return computed


@pytest.mark.parametrize(("at_once", "batch"), [(1, [1, 1, 1]), (1 << 15, [2, 1]), (1 << 19, [3])])
def test_parts_of_any_size_give_the_same(in_chunks, backend, monkeypatch, at_once, batch):
    monkeypatch.setattr(inductor.Segment, "at_once", at_once)
    backend.assert_right(*ROW.both(inductor), tensors(shape=(3, 134, 4, 3)), ROW.tolerance)
    forward = [(some, tokens) for some in batch for tokens in (64, 64, 6)]
    assert in_chunks == [*forward, *((some, tokens) for some in batch for tokens in (6, 64, 64))]
