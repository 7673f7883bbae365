"""The reference is exact where it can be, and its errors name what does not fit."""

import pytest
import torch

from fuseplug_rope.reference import VARIANTS, rope

DIM = 12


def inputs(variant, dtype=torch.float64, width=DIM):
    how = VARIANTS[variant]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rotated = width if how.width == "whole" else width - 4
    angles = rotated // 2 if how.table == "half" else rotated
    return normal(2, 3, 5, width), normal(2, 2, 5, width), normal(2, 1, 5, angles), normal(2, 1, 5, angles)


def by_the_book(x, cos, sin, how):
    """The rotation, one plane after the other."""
    rotated = cos.shape[-1] * (2 if how.table == "half" else 1)
    start = x.shape[-1] - rotated if how.width == "trailing" else 0
    half = rotated // 2
    out = x.clone()
    for plane in range(half):
        pair, halves = (2 * plane, 2 * plane + 1), (plane, half + plane)
        reads, writes = (pair if order == "pairs" else halves for order in (how.reads, how.writes))
        own = writes if how.table == "full" else (plane, plane)
        a, b = (x[..., start + at] for at in reads)
        sign = -1 if how.negated else 1
        out[..., start + writes[0]] = a * cos[..., own[0]] - sign * b * sin[..., own[0]]
        out[..., start + writes[1]] = b * cos[..., own[1]] + sign * a * sin[..., own[1]]
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_the_formula_in_float64(variant):
    q, k, cos, sin = inputs(variant)
    for found, x in zip(rope(q, k, cos, sin, variant=variant), (q, k), strict=True):
        torch.testing.assert_close(found, by_the_book(x, cos, sin, VARIANTS[variant]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_function(variant):
    tensors = [t[:1, :, :2].requires_grad_() for t in inputs(variant)]
    assert torch.autograd.gradcheck(lambda *tensors: rope(*tensors, variant=variant), tensors)


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_k_q_is_rotated_alone(variant):
    q, k, cos, sin = inputs(variant)
    alone, nothing = rope(q, None, cos, sin, variant=variant)
    assert nothing is None
    assert torch.equal(alone, rope(q, k, cos, sin, variant=variant)[0])


@pytest.mark.parametrize(
    ("variant", "table", "q_out", "k_out"),
    [
        ("half", torch.bfloat16, torch.bfloat16, torch.float32),
        ("half", torch.float32, torch.float32, torch.float32),
        ("half-promoting", torch.float32, torch.bfloat16, torch.float32),
        ("half-vision", torch.float32, torch.bfloat16, torch.float32),
        ("half-wide", torch.float32, torch.bfloat16, torch.bfloat16),
        ("interleaved-wide", torch.float32, torch.bfloat16, torch.bfloat16),
        ("complex", torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_the_results_have_the_dtypes_that_the_models_give(variant, table, q_out, k_out):
    q, k, cos, sin = inputs(variant, torch.float32)
    found = rope(q.bfloat16(), k, cos.to(table), sin.to(table), variant=variant)
    assert [x.dtype for x in found] == [q_out, k_out]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("empty", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_empty_tensors(variant, empty):
    _, _, cos, sin = inputs(variant)
    batch, _, length = empty
    q = torch.zeros(*empty, DIM, dtype=torch.float64)
    tables = [t[:batch, :, :length] for t in (cos, sin)]
    assert rope(q, None, *tables, variant=variant)[0].shape == q.shape


def test_an_unknown_variant_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"unknown RoPE variant 'whole'.*half-partial"):
        rope(*inputs("half"), variant="whole")


@pytest.mark.parametrize(
    ("variant", "angles"), [("half", DIM - 2), ("half", DIM + 2), ("half-partial", DIM + 2), ("half-size", DIM)]
)
def test_tables_of_the_wrong_width_are_refused_with_both_widths(variant, angles):
    q, k, _, _ = inputs(variant)
    table = torch.zeros(1, 1, 5, angles, dtype=q.dtype)
    with pytest.raises(ValueError, match=f"cos of {angles} angles rotates .* q has {DIM}"):
        rope(q, k, table, table, variant=variant)
