"""What is specific to RoPE in Triton: one launch, several programs, and what is not written, copied or compiled."""

import functools
import itertools

import pytest
import torch
from support import rotations
from support.rotations import DIM, HALF, SIZES, WAYS, as_attention, heads_first, on, outcome, tensors
from support.thorough import covering
from torch import nn

from fuseplug_rope.backends import triton
from fuseplug_rope.backends.triton import cutting, launch
from fuseplug_rope.reference import rope as reference


@pytest.fixture
def launched(backend):
    """The launches of the one operation, forward or backward."""
    backend.module("rope")
    return backend.order


@pytest.fixture
def device(backend, launched):
    return backend.device


@pytest.fixture
def check(device):
    return functools.partial(rotations.assert_right, triton.rope, device)


@pytest.fixture
def small_blocks(monkeypatch):
    """Limits a program to two heads or two positions, so that there are several, and the last has less to do."""
    monkeypatch.setattr(cutting, "_MOST_ELEMENTS", 2 * DIM)
    monkeypatch.setattr(cutting, "_ENOUGH_ELEMENTS", 4 * DIM)
    cutting.cut.cache_clear()
    yield
    cutting.cut.cache_clear()


@pytest.mark.parametrize(("variant", "sizes"), covering(itertools.product(WAYS, SIZES)), ids=str)
def test_several_programs(check, launched, small_blocks, variant, sizes):
    check(tensors(variant, **sizes), variant=variant)
    assert len(launched) == 2


def test_several_programs_repeat_to_the_bit(device, small_blocks):
    leaves = on(device, [t.requires_grad_() for t in tensors(x=torch.bfloat16)])
    once, again = (outcome(triton.rope, leaves, as_attention) for _ in range(2))
    assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("variant", WAYS)
def test_nothing_is_written_beyond_the_results(device, small_blocks, variant):
    q, k, cos, sin = (t.detach() for t in on(device, tensors(variant, batch=1, length=3)))
    around = [torch.full((1, 5, x.shape[2] + 2, DIM + 4), 7.0, device=device) for x in (q, k)]
    within = [heads_first(memory[:, 1:-1, 1:-1, 2:-2]) for memory in around]
    launch.rotate.launch(within, heads_first(q), heads_first(k), cos, sin, q.dtype, k.dtype, variant, False)
    torch.testing.assert_close(tuple(within), reference(heads_first(q), heads_first(k), cos, sin, variant=variant))
    for memory, inside in zip(around, within, strict=True):
        inside.fill_(7.0)
        assert (memory == 7.0).all()


def test_tables_that_lie_differently_in_memory(check):
    def see(q, k, cos, sin):
        return heads_first(q), heads_first(k), cos, torch.cat((sin, sin), -1)[..., : sin.shape[-1]]

    check(tensors(tables=2), see)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_that_are_needed_are_written(device, monkeypatch, frozen):
    leaves = tensors()
    leaves[frozen].requires_grad_(False)
    written = []
    run = launch.rotate.launch
    monkeypatch.setattr(
        launch.rotate, "launch", lambda results, *rest: written.append(len(results)) or run(results, *rest)
    )
    rotations.assert_right(triton.rope, device, leaves)
    assert written == [2, 1]


BEYOND = rotations.RARE | {
    "nothing to rotate": ("half-partial", as_attention, {"rest": DIM}),
    "tables that enlarge k": (
        HALF,
        lambda q, k, *tables: (heads_first(q), heads_first(k)[:1], *tables),
        {"tables": 2, "heads": (3, 3)},
    ),
}


@pytest.mark.parametrize("case", BEYOND)
def test_beyond_one_launch_it_is_the_reference(check, launched, case):
    variant, see, sizes = BEYOND[case]
    check(tensors(variant, **sizes), see, variant)
    assert launched == []


def test_a_k_of_other_tokens_is_the_reference(check, launched):
    q, k, _, _ = tensors(length=4)
    cos, sin = (t[:, :, :1] for t in tensors()[2:])
    check([q, k, cos, sin], lambda q, k, *tables: (heads_first(q), heads_first(k)[..., :2, :], *tables))
    assert launched == []


def test_gradients_of_a_batch_of_gradients(device, launched):
    q, k, cos, sin = as_attention(*on(device, tensors()))
    grads = torch.randn(3, *q.shape, device=device)
    gradients = [
        torch.autograd.grad(function(q, k, cos, sin)[0], q, grads, is_grads_batched=True)[0]
        for function in (triton.rope, reference)
    ]
    torch.testing.assert_close(*gradients)
    assert len(launched) == 1


def test_tracers_and_subclasses_see_the_reference(device, launched):
    q, _, cos, sin = (t.detach() for t in as_attention(*on(device, tensors())))

    class Own(torch.Tensor):
        pass

    def ours(q): return triton.rope(q, None, cos, sin)[0]  # fmt: skip

    expected = reference(q, None, cos, sin)[0]
    torch.testing.assert_close(torch.jit.trace(ours, (q,), check_trace=False)(q), expected)
    torch.testing.assert_close(ours(q.as_subclass(Own)).as_subclass(torch.Tensor), expected)
    assert launched == []


def test_sizes_that_change_are_compiled_once(device, launched):
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(
        triton.rope, fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    for batch, length in ((4, 5), (6, 7), (8, 11)):
        arguments = [t.detach() for t in as_attention(*on(device, tensors(batch=batch, length=length)))]
        torch.testing.assert_close(compiled(*arguments), reference(*arguments))
    assert len(graphs) == 1
    assert len(launched) == 3


def test_exports(device, launched):
    class Rotates(nn.Module):
        def forward(self, q, k, cos, sin):
            return triton.rope(q, k, cos, sin)

    arguments = tuple(t.detach() for t in as_attention(*on(device, tensors())))
    program = torch.export.export(Rotates(), arguments)
    assert "fuseplug_rope.rotate.default" in str(program.graph)
    torch.testing.assert_close(program.module()(*arguments), reference(*arguments))
    assert len(launched) == 1


def test_passes_the_checks_of_torch(device):
    q, k, cos, sin = (t.detach() for t in as_attention(*on(device, tensors())))
    for other, transposed in ((k, False), (None, True)):
        arguments = (q, other, cos, sin, torch.bfloat16, torch.float32, HALF, transposed)
        torch.library.opcheck(launch.rotate.op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_rows_that_are_far_apart(device, monkeypatch):
    """Rows that are further apart than 32 bits reach; only the memory that is written exists."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    q, _, cos, sin = (t.detach() for t in on(device, tensors(batch=1, length=3)))
    far = torch.empty(1, dtype=torch.int8, device=device).new_empty(9 << 30).view(torch.float32)
    far = far.as_strided(q.shape, (1, 1 << 30, DIM, 1)).copy_(q)
    torch.testing.assert_close(triton.rope(heads_first(far), None, cos, sin), reference(heads_first(q), None, cos, sin))
