"""A linear formula compiled for several tensors: any layout, few programs, and only what a backward needs is kept."""

import itertools

import pytest
import torch
from support.recorded import uncompiled
from support.thorough import covering

from fuseplug_backends.inductor import CompiledLinear, program


def scaled(x, table, factor):
    return x * table * factor


@pytest.fixture
def compiled(everything_compiled, monkeypatch):
    """Programs are recorded, but run uncompiled: these tests are about their inputs, not about machine code."""
    monkeypatch.setattr(program, "compiled_by_inductor", uncompiled)
    return CompiledLinear(scaled)


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize(
    ("order", "table"),
    covering(
        itertools.product(
            [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (1, 2, 0, 3)],
            [(7,), (4, 7), (3, 1, 7), (2, 1, 1, 7), (2, 3, 4, 7)],
        )
    ),
    ids=str,
)
def test_every_order_of_memory_and_every_way_to_broadcast(compiled, order, table):
    place = [order.index(dim) for dim in range(4)]
    x = some(*(((2, 3, 4, 7)[dim]) for dim in order)).permute(place).requires_grad_()
    table = some(*table).requires_grad_()
    (found,) = compiled([(2.0,)], [x], [table])
    torch.testing.assert_close(found, scaled(x, table, 2.0))
    assert found.stride() == x.stride()
    grads = (torch.autograd.grad(y.square().sum(), (x, table)) for y in (found, scaled(x, table, 2.0)))
    torch.testing.assert_close(*grads)


def test_one_program_serves_all_sizes_and_what_is_merged_into_them(compiled):
    for batch, length, heads in ((1, 5, 5), (3, 4, 2), (2, 2, 6)):
        x = some(batch, length, heads, 7).transpose(1, 2)
        compiled([(1.0,)], [x], [some(batch, 1, length, 7)])
    assert len(compiled._programs) == 1


def test_rows_with_gaps_beside_a_dimension_without_extent_have_a_program_of_their_own(everything_compiled):
    """One head of keys that is cut out of a wider projection, for example, after a head that is not."""
    compiled, q, table = CompiledLinear(scaled), some(2, 4, 1, 8), some(2, 1, 1, 8)
    for k in (some(2, 1, 1, 8), some(2, 1, 1, 16)[..., 8:]):
        found = compiled([(2.0,), (2.0,)], [q, k], [table])
        torch.testing.assert_close(tuple(found), (scaled(q, table, 2.0), scaled(k, table, 2.0)))


def test_each_of_several_tensors_has_its_constants_and_its_shape(compiled):
    one, two = some(2, 3, 7), some(2, 5, 7)
    table = some(2, 1, 7)
    found = compiled([(2.0,), (-1.0,)], [one, two], [table])
    torch.testing.assert_close(found, (scaled(one, table, 2.0), scaled(two, table, -1.0)))


def test_without_gradients_for_the_tables_the_tensors_are_not_kept(compiled):
    x, table = some(2, 3, 7).requires_grad_(), some(7)
    for need, expected in ((False, [table]), (True, [x, table])):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            compiled([(1.0,)], [x], [table.requires_grad_(need)])
        assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in expected]


def test_what_needs_no_gradient_has_none(compiled):
    one, two = some(2, 3, 7).requires_grad_(), some(2, 5, 7)
    assert [y.requires_grad for y in compiled([(1.0,), (1.0,)], [one, two], [some(7)])] == [True, False]


def test_layouts_are_forgotten_rather_than_gathered(compiled, monkeypatch):
    from fuseplug_backends.inductor import linear

    monkeypatch.setattr(linear, "_MOST_VIEWS", 2)
    for length in range(2, 8):
        compiled([(1.0,)], [some(length, 7)], [some(7)])
        assert len(compiled._views) <= 2


@pytest.mark.parametrize("tables_too", [False, True])
def test_what_was_made_into_a_result_that_nobody_used_has_no_gradient(compiled, tables_too):
    one, two = some(2, 3, 7).requires_grad_(), some(2, 5, 7).requires_grad_()
    table = some(2, 1, 7).requires_grad_(tables_too)
    found = compiled([(2.0,), (-1.0,)], [one, two], [table])
    found[1].square().sum().backward()
    got, one.grad, two.grad, table.grad = (one.grad, two.grad, table.grad), None, None, None
    scaled(two, table, -1.0).square().sum().backward()
    assert got[0] is None
    torch.testing.assert_close(got[1], two.grad)
    assert not tables_too or torch.allclose(got[2], table.grad)


def test_a_result_may_be_written_into(compiled):
    x = some(2, 3, 4, 7).transpose(1, 2).requires_grad_()
    first, second = compiled([(2.0,), (1.0,)], [x, x], [some(7)])
    first.mul_(3.0)
    (first.sum() + second.sum()).backward()
    torch.testing.assert_close(x.grad, (7.0 * some(7)).expand_as(x))
