"""The selective scan in chunks: which calls are computed so, and that it does not matter how they are cut."""

from __future__ import annotations

import pytest
import torch
from support.scans import BF16, DOUBLE, TOLERANCE, both, tensors
from torch import nn

from fuseplug_selective_scan.backends import inductor
from fuseplug_selective_scan.reference import selective_scan as reference


@pytest.fixture
def in_chunks(monkeypatch):
    """The chunks that are computed, by the shape of their x."""
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
    backend.assert_right(*both(inductor, delta_softplus=True), arguments, TOLERANCE)
    parts = [(some, few) for some in batch for few in channels]
    forward = [(*part, tokens) for part in parts for tokens in (32, 32, 6)]
    assert in_chunks == [*forward, *((*part, tokens) for part in parts for tokens in (6, 32, 32))]


def test_it_is_exact_in_float64():
    arguments = [t.to(DOUBLE).requires_grad_() for t in tensors(shape=(2, 5, 70)).values()]
    found, expected = (
        torch.autograd.grad(sum(result.cos().sum() for result in function(*arguments)), arguments)
        for function in both(inductor, delta_softplus=True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_no_more_is_kept_than_the_arguments_and_a_state_for_each_chunk():
    arguments = {name: t.requires_grad_() for name, t in tensors(BF16, shape=(2, 5, 70)).items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        inductor.selective_scan(**arguments)
    own = {t.data_ptr() for t in arguments.values()}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in own] == [(3, 2, 3, 5)]


def test_what_is_kept_may_not_be_written_into():
    arguments = {name: t.requires_grad_(name == "x") for name, t in tensors().items()}
    y, _ = inductor.selective_scan(**arguments)
    arguments["B"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 8), (2, 3, 40)])
def test_results_share_no_memory_with_arguments(shape, optional):
    arguments = tensors(shape=shape, optional=optional)
    before = {name: t.clone() for name, t in arguments.items()}
    for result in inductor.selective_scan(**arguments):
        result.zero_()
    assert all(torch.equal(t, before[name]) for name, t in arguments.items())


def test_gradients_that_are_handed_in_stay_as_they_are():
    arguments = {name: t.requires_grad_() for name, t in tensors().items()}
    results = inductor.selective_scan(**arguments)
    # In memory as the kernel would have them, so that it need not copy them to read them.
    handed_in = [
        torch.ones_like(t).permute(order).contiguous() for t, order in zip(results, [(2, 0, 1), (0, 2, 1)], strict=True)
    ]
    torch.autograd.backward(results, [handed_in[0].permute(1, 2, 0), handed_in[1].mT])
    assert all(bool((t == 1).all()) for t in handed_in)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_module_that_uses_it_exports_and_traces(in_chunks):
    class Scans(nn.Module):
        def forward(self, *args):
            return inductor.selective_scan(*args)

    arguments = tuple(tensors(shape=(1, 2, 3)).values())
    exported = torch.export.export(Scans(), arguments).module()
    for function in (exported, torch.jit.trace(Scans(), arguments, check_trace=False)):
        torch.testing.assert_close(function(*arguments), reference(*arguments))
    assert not in_chunks
