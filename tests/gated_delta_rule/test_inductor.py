"""The gated delta rule in chunks: which calls are computed so, and that it does not matter how they are cut."""

from __future__ import annotations

import pytest
import torch
from support.delta_rules import BF16, DOUBLE, TOLERANCE, both, tensors
from torch import nn

from fuseplug_gated_delta_rule.backends import inductor
from fuseplug_gated_delta_rule.backends.pairs import sums_in_parts
from fuseplug_gated_delta_rule.reference import VARIANTS
from fuseplug_gated_delta_rule.reference import gated_delta_rule as reference


@pytest.fixture
def in_chunks(monkeypatch):
    """The segments that are computed, by their tokens."""
    computed = []

    def scan(segment, state):
        computed.append(segment.tokens)
        own(segment, state)

    own = inductor.Segment._scan
    monkeypatch.setattr(inductor.Segment, "_scan", scan)
    return computed


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("at_once", "segments"), [(1, [64, 64, 22]), (512, [128, 22]), (1 << 11, [150])])
def test_segments_of_any_size_give_the_same(in_chunks, backend, monkeypatch, variant, at_once, segments):
    monkeypatch.setattr(inductor.Segment, "at_once", at_once)
    arguments = tensors(variant, shape=(1, 150, 2, 2))
    backend.assert_right(*both(inductor, variant, normalised=True), arguments, TOLERANCE)
    assert in_chunks == [*segments, *reversed(segments)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("state", [True, False])
def test_a_step_of_decoding_is_computed_by_itself(in_chunks, variant, state):
    arguments = tensors(variant, BF16, shape=(3, 1, 2, 2), state=state)
    before = {name: t.clone() for name, t in arguments.items()}
    (y, after), (expected, expected_after) = (
        function(**arguments) for function in both(inductor, variant, normalised=True)
    )
    torch.testing.assert_close((y, after), (expected, expected_after), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(after, expected_after, rtol=1e-5, atol=1e-5)
    assert y.is_contiguous()
    assert all(torch.equal(t, before[name]) for name, t in arguments.items())
    assert not in_chunks
    arguments["v"].requires_grad_()
    inductor.gated_delta_rule(**arguments, variant=variant)[0].sum().backward()
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_exact_in_float64(variant):
    arguments = [t.to(DOUBLE).requires_grad_() for t in tensors(variant, shape=(2, 70, 2, 2)).values()]
    found, expected = (
        torch.autograd.grad(sum(each.cos().sum() for each in function(*arguments)), arguments)
        for function in both(inductor, variant, normalised=True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_no_more_is_kept_than_the_arguments_and_a_state_for_each_segment():
    arguments = {name: t.requires_grad_() for name, t in tensors(dtype=BF16, shape=(1, 700, 2, 2)).items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        inductor.gated_delta_rule(**arguments)
    own = {t.data_ptr() for t in arguments.values()}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in own] == [(2, 4, 6, 5)]


def test_what_is_kept_may_not_be_written_into():
    arguments = {name: t.requires_grad_(name == "v") for name, t in tensors().items()}
    y, _ = inductor.gated_delta_rule(**arguments)
    arguments["k"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_results_share_no_memory_with_arguments():
    arguments = tensors(shape=(1, 16, 1, 1))
    before = {name: t.clone() for name, t in arguments.items()}
    for result in inductor.gated_delta_rule(**arguments):
        result.zero_()
    assert all(torch.equal(t, before[name]) for name, t in arguments.items())


@pytest.mark.parametrize(("variant", "chunks"), [("head", True), ("channel", False)])
def test_decays_above_0_are_exact_or_the_references(in_chunks, variant, chunks):
    arguments = tensors(variant)
    arguments["g"][:, 4] = 0.5
    found, expected = (function(**arguments) for function in both(inductor, variant))
    torch.testing.assert_close(found, expected)
    assert bool(in_chunks) == chunks


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_module_that_uses_it_exports_and_traces(in_chunks):
    class Mixes(nn.Module):
        def forward(self, *args):
            return inductor.gated_delta_rule(*args)

    arguments = tuple(tensors(shape=(1, 3, 1, 2)).values())
    exported = torch.export.export(Mixes(), arguments).module()
    for function in (exported, torch.jit.trace(Mixes(), arguments, check_trace=False)):
        torch.testing.assert_close(function(*arguments), reference(*arguments))
    assert not in_chunks
