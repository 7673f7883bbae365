"""Every recurrence in chunks: how exact it is, what it keeps, and what it leaves unwritten."""

import importlib
import itertools

import pytest
import torch
from support.recurrences import BF16, DOUBLE, rows
from torch import nn

ROWS = rows()

every = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@pytest.fixture
def kernel(row):
    return importlib.import_module(f"fuseplug_{row.op}.backends.inductor")


def leaves_of(row, *dtypes, **shape):
    return {name: t.requires_grad_() for name, t in row.tensors(*dtypes, **shape).items()}


@every
@pytest.mark.parametrize("usual", [True, False])
def test_it_is_exact_in_float64(row, kernel, usual):
    arguments = [t.to(DOUBLE).requires_grad_() for t in row.tensors(**row.long).values()]
    gradients, expected = (
        torch.autograd.grad(sum(result.cos().sum() for result in function(*arguments)), arguments)
        for function in row.both(kernel, **({} if usual else row.others[-1]))
    )
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-11)


@every
def test_no_more_is_kept_than_the_arguments_and_the_states_before_each_part(row, kernel):
    how, shapes = row.kept
    arguments, kept = leaves_of(row, BF16, **how), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        row.both(kernel)[0](**arguments)
    own = {t.data_ptr() for t in arguments.values()}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in own] == shapes


@every
def test_what_is_kept_may_not_be_written_into(row, kernel):
    arguments = row.tensors()
    arguments[row.two[0]].requires_grad_()
    y, _ = row.both(kernel)[0](**arguments)
    arguments[row.two[1]].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("optional", [True, False])
@every
def test_results_share_no_memory_with_arguments(row, kernel, optional):
    for shape in (*row.short, row.step):
        arguments = row.tensors(**shape, optional=optional)
        before = {name: t.clone() for name, t in arguments.items()}
        for result in row.both(kernel)[0](**arguments):
            result.zero_()
        assert all(torch.equal(t, before[name]) for name, t in arguments.items())


@every
def test_gradients_that_are_handed_in_stay_as_they_are(row, kernel):
    """In whatever order of memory, including the kernel's own, in which it need not copy them to read them."""
    results = row.both(kernel)[0](**leaves_of(row, **row.short[-1]))
    for number, result in enumerate(results):
        for order in itertools.permutations(range(result.dim())):
            handed_in = [torch.ones_like(t) for t in results]
            lying = torch.ones([result.shape[dim] for dim in order])
            handed_in[number] = lying.permute([order.index(dim) for dim in range(result.dim())])
            torch.autograd.backward(results, handed_in, retain_graph=True)
            assert all(bool((t == 1).all()) for t in handed_in)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@every
def test_a_module_that_uses_it_exports_and_traces(row, kernel, monkeypatch):
    ours, reference = row.both(kernel)

    def never(*_):
        raise AssertionError("it is traced in chunks")

    class Mixes(nn.Module):
        def forward(self, *args):
            return ours(*args)

    monkeypatch.setattr(kernel, "_in_chunks", never)
    arguments = tuple(row.tensors(**row.tiny).values())
    exported = torch.export.export(Mixes(), arguments).module()
    for function in (exported, torch.jit.trace(Mixes(), arguments, check_trace=False)):
        torch.testing.assert_close(function(*arguments), reference(*arguments))
