"""Mamba-2's recurrence in chunks: which calls are computed so, and that it does not matter how they are cut."""

from __future__ import annotations

import pytest
import torch
from support.ssd import BF16, DOUBLE, TOLERANCE, both, tensors
from torch import nn

from fuseplug_ssd.backends import inductor
from fuseplug_ssd.reference import ssd as reference


@pytest.fixture
def in_chunks(monkeypatch):
    """The chunks that are computed, by the shape of their x."""
    computed = []

    class Chunk(inductor.Chunk):
        def __init__(self, step, inputs, state):
            super().__init__(step, inputs, state)
            computed.append(tuple(inputs.x.shape[:2]))

    monkeypatch.setattr(inductor, "Chunk", Chunk)
    return computed


@pytest.mark.parametrize(("at_once", "batch"), [(1, [1, 1, 1]), (1 << 15, [2, 1]), (1 << 19, [3])])
def test_parts_of_any_size_give_the_same(in_chunks, backend, monkeypatch, at_once, batch):
    monkeypatch.setattr(inductor, "_AT_ONCE", at_once)
    backend.assert_right(*both(inductor, dt_softplus=True), tensors(shape=(3, 134, 4, 3)), TOLERANCE)
    forward = [(some, tokens) for some in batch for tokens in (64, 64, 6)]
    assert in_chunks == [*forward, *((some, tokens) for some in batch for tokens in (6, 64, 64))]


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 1.0)])
def test_it_is_exact_in_float64(limit):
    arguments = [t.to(DOUBLE).requires_grad_() for t in tensors(shape=(2, 134, 4, 3)).values()]
    found, expected = (
        torch.autograd.grad(sum(result.cos().sum() for result in function(*arguments)), arguments)
        for function in both(inductor, dt_softplus=True, dt_limit=limit)
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_no_more_is_kept_than_the_arguments_and_the_states_before_each_chunk():
    arguments = {name: t.requires_grad_() for name, t in tensors(BF16, shape=(2, 134, 4, 3)).items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        inductor.ssd(**arguments)
    own = {t.data_ptr() for t in arguments.values()}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in own] == [(3, 2, 4, 3, 3)]


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 64, 2, 1), (2, 70, 2, 3)])
def test_results_share_no_memory_with_arguments(shape):
    arguments = tensors(shape=shape, groups=1)
    before = {name: t.clone() for name, t in arguments.items()}
    for result in inductor.ssd(**arguments):
        result.zero_()
    assert all(torch.equal(t, before[name]) for name, t in arguments.items())


def test_gradients_that_are_handed_in_stay_as_they_are():
    arguments = {name: t.requires_grad_() for name, t in tensors(shape=(2, 70, 1, 3), groups=1).items()}
    results = inductor.ssd(**arguments)
    handed_in = [torch.ones_like(t) for t in results]
    torch.autograd.backward(results, handed_in)
    assert all(bool((t == 1).all()) for t in handed_in)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_module_that_uses_it_exports_and_traces(in_chunks):
    class Scans(nn.Module):
        def forward(self, *args):
            return inductor.ssd(*args)

    arguments = tuple(tensors(shape=(1, 3, 2, 2), groups=1).values())
    exported = torch.export.export(Scans(), arguments).module()
    for function in (exported, torch.jit.trace(Scans(), arguments, check_trace=False)):
        torch.testing.assert_close(function(*arguments), reference(*arguments))
    assert not in_chunks
