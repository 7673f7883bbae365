"""The gated delta rule in chunks: which calls are computed in chunks, and that any cut gives the same."""

import pytest
import torch
from support.delta_rules import ROWS

from fuseplug_gated_delta_rule.backends import inductor
from fuseplug_gated_delta_rule.backends.pairs import sums_in_parts

every = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@pytest.fixture
def in_chunks(monkeypatch):
    """The number of tokens of each segment that is computed."""
    computed = []

    def scan(segment, state):
        computed.append(segment.tokens)
        own(segment, state)

    own = inductor.Segment._scan
    monkeypatch.setattr(inductor.Segment, "_scan", scan)
    return computed


@every
@pytest.mark.parametrize(("at_once", "segments"), [(1, [64, 64, 22]), (512, [128, 22]), (1 << 11, [150])])
def test_segments_of_any_size_give_the_same(in_chunks, backend, monkeypatch, row, at_once, segments):
    monkeypatch.setattr(inductor.Segment, "at_once", at_once)
    backend.assert_right(*row.both(inductor), row.tensors(shape=(1, 150, 2, 2)), row.tolerance)
    assert in_chunks == [*segments, *reversed(segments)]


@every
def test_a_step_of_decoding_is_computed_by_itself(in_chunks, row):
    arguments = row.tensors(**row.step)
    y, _ = row.both(inductor)[0](**arguments)
    assert y.is_contiguous()
    assert not in_chunks
    arguments["v"].requires_grad_()
    row.both(inductor)[0](**arguments)[0].sum().backward()
    assert in_chunks == [1, 1]


def test_a_difference_of_two_sums_of_decays_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    strong, g = (torch.rand(9, 2, 64, 1, generator=generator) for _ in range(2))
    g = -g * torch.where(strong < 0.3, 105.0, 1.0)
    sums, exact = sums_in_parts(g), g.double().cumsum(2)
    differences, expected = ((x - x.mT).tril_(-1) for x in (sums, exact))
    assert sums.dtype is torch.float32
    assert (differences.sum(0) - expected).abs().le(torch.finfo(torch.float32).eps * expected.abs()).all()
    assert not (exact.float() - exact.float().mT - expected).abs().le(1e-6 * expected.abs()).all()


@pytest.mark.parametrize(("variant", "chunks"), [("head", True), ("channel", False)])
def test_decays_above_0_are_exact_or_the_references(in_chunks, variant, chunks):
    row = ROWS[f"gated_delta_rule-{variant}"]
    arguments = row.tensors()
    arguments["g"][:, 4] = 0.5
    results, expected = (function(**arguments) for function in row.both(inductor))
    torch.testing.assert_close(results, expected)
    assert bool(in_chunks) == chunks
