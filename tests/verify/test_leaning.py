"""In half precision, a bias to one side is told from roundings, in tensors of every shape."""

import pytest
import torch

from fuseplug_verify import Outcome, Tolerance

HALVES = (torch.bfloat16, torch.float16)
SHAPES = {"vector": (2048,), "matrix": (192, 256), "heads": (2, 8, 64, 32), "experts": (8, 48, 32)}
TOLERANCE = Tolerance(roundings=8.0, working_roundings=64.0)


def judged(found, expected, true, **how):
    """The verdict on one tensor."""
    ours, theirs, truth = (Outcome({"gradient of x": value}) for value in (found, expected, true))
    return TOLERANCE.excess(ours, theirs, truth, **how)


def normal(shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rounded(true, dtype, seed=1):
    """*true* with the error of a right implementation, which rounds twice."""
    noise = normal(true.shape, seed).clamp(-2, 2) * torch.finfo(dtype).eps / 8
    return (true * (1 + noise)).to(dtype)


def scaled(factor, *where):
    def fault(value):
        value = value.clone()
        value[where] = value[where] * factor
        return value

    return fault


FAULTS = {
    "1.02": ("matrix", scaled(1.02), "too large on average over 49,152 elements;"),
    "1.01": ("heads", scaled(1.01), "too large on average over 32,768 elements;"),
    "1.004": ("vector", scaled(1.004), "too large on average over 2,048 elements;"),
    "0.99": ("experts", scaled(0.99), "too small on average over 12,288 elements;"),
    "half of the columns": ("matrix", scaled(1.02, ..., slice(128)), "too large"),
    "the last row": ("matrix", scaled(1.02, -1), "too large on average over 256 elements, number 191 of dimension 0;"),
    "one head": ("heads", scaled(1.02, slice(None), 3), "too large on average over 4,096 elements, number 3 of dim"),
    "one expert": ("experts", scaled(0.98, 5), "too small on average over 1,536 elements, number 5 of dimension 0;"),
    "added": ("matrix", lambda value: value + 0.01, "too high on average over 49,152 elements;"),
    "added to a column": (
        "matrix",
        lambda value: value - 0.05 * (torch.arange(256) == 7),
        "too low on average over 192 elements, number 7 of dimension 1;",
    ),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "fault", "why"), FAULTS.values(), ids=list(FAULTS))
def test_a_bias_is_told_from_roundings(shape, fault, why, dtype):
    true = normal(SHAPES[shape])
    right, other = rounded(true, dtype), rounded(true, dtype, seed=2)
    assert judged(right, other, true) == ""
    said = judged(fault(right.double()).to(dtype), other, true)
    assert why in said or "is off by" in said  # in float16, single numbers may be too far off, too
    assert dtype is torch.float16 or why in said
    if why in said:
        assert said.startswith("gradient of x is ")
        assert "rounding explains at most " in said


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_roundings_are_no_bias(shape, dtype):
    true = normal(shape)
    for seed in range(1, 21):
        assert judged(rounded(true, dtype, seed), rounded(true, dtype, 100 + seed), true) == ""


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [0, 1], ids=["row", "column"])
def test_a_rounding_that_a_row_or_a_column_shares_is_no_bias(dim, dtype):
    true = normal((96, 64))
    exact = true.float().to(dtype)
    for seed in range(20):
        factor = 1 + (torch.rand(true.shape[dim], generator=torch.Generator().manual_seed(seed)) - 0.5) * 2**-8
        factor = factor.unsqueeze(1 - dim) if dtype is torch.bfloat16 else 1 + (factor.unsqueeze(1 - dim) - 1) / 8
        assert judged((exact.double() * factor).to(dtype), exact, true) == ""


ODD = {
    "nothing": torch.zeros(0, 8),
    "a number": torch.tensor(3.0),
    "few": torch.linspace(1, 2, 36),
    "zeros": torch.zeros(64, 64),
}


@pytest.mark.parametrize("true", ODD.values(), ids=list(ODD))
def test_what_says_nothing_of_a_bias_is_not_judged_by_it(true):
    found = (true * 1.004).bfloat16()
    assert judged(found, true.bfloat16(), true.double()) == ""


def test_numbers_that_are_not_finite_are_left_out():
    true = normal((64, 64))
    true[3, 5], true[7, 9], true[:, 11] = torch.inf, torch.nan, -torch.inf
    right = rounded(true, torch.bfloat16)
    assert judged(right, right, true) == ""
    assert "too large" in judged((right * 1.004), right, true)


def test_rows_of_zeros_and_rows_of_other_magnitudes_do_not_hide_it():
    true = normal((192, 64)) * torch.tensor([1.0, 1e-3, 300.0, 0.0]).repeat(48)[:, None]
    right = rounded(true, torch.bfloat16)
    assert judged(right, right, true) == ""
    small = torch.tensor([1.0, 1.02, 1.0, 1.0]).repeat(48)[:, None]
    assert "too large" in judged((right * small).bfloat16(), right, true)


def test_a_kernel_may_be_as_biased_as_the_original():
    true = normal((64, 64))
    exact = rounded(true, torch.bfloat16)
    original = (exact * 1.004).bfloat16()
    assert judged(original, original, true) == ""
    assert "too large" in judged(original, exact, true)


def test_underflow_is_as_the_originals():
    true = normal((64, 64)) * 1e-8
    assert judged(true.half(), true.half(), true) == ""


def test_copies_of_rows_say_nothing():
    true = normal((1, 64)).repeat(512, 1)
    copies = (rounded(true[:1], torch.bfloat16) * 1.004).bfloat16().repeat(512, 1)
    assert judged(copies, true.bfloat16(), true)
    assert judged(copies, true.bfloat16(), true, repeated=True) == ""
