"""Examples are varied so that their arguments still fit together."""

import pytest
import torch

from fuseplug_verify import Example
from fuseplug_verify.verification.varying import variations

Q, K, COS, INDEX, ROWS = (2, 3, 5, 8), (2, 2, 5, 8), (2, 5, 8), (6, 2), (2, 3, 8)


def shapes(given, label):
    example = Example([torch.randn(shape) for shape in given])
    found = {each.label: each.example for each in variations(example, sizes=(), numbers=(), clamps=False)}
    return [tuple(each.shape) for each in found[label].args] if label in found else None


@pytest.mark.parametrize(
    ("given", "label", "expected"),
    [
        ([Q, Q], "130 in dimension 0", [(130, 3, 5, 8), (130, 3, 5, 8)]),
        ([Q, K], "130 in dimension 0", [(130, 3, 5, 8), (130, 2, 5, 8)]),
        ([Q, K], "130 in dimension 1", [(2, 130, 5, 8), (2, 2, 5, 8)]),
        ([Q, K, COS], "1 in dimension 2", [(2, 3, 1, 8), (2, 2, 1, 8), (2, 1, 8)]),
        ([Q, K, COS], "130 in dimension 0", [(130, 3, 5, 8), (130, 2, 5, 8), (130, 5, 8)]),
        ([ROWS, INDEX], "130 in dimension 1", [(2, 130, 8), (260, 2)]),
        ([ROWS, INDEX], "0 in dimension 0", [(0, 3, 8), (0, 2)]),
        ([Q, K, COS], "of one row", [(1, 1, 1, 8), (1, 2, 1, 8), (1, 1, 8)]),
        ([ROWS, INDEX], "of one row", [(1, 1, 8), (1, 2)]),
        ([Q, Q], "1 dimensions", [(8,), (8,)]),
        ([Q, K], "1 dimensions", None),
    ],
    ids=str,
)
def test_what_belongs_together_is_changed_together(given, label, expected):
    assert shapes(given, label) == expected


def test_numbers_of_the_code_are_tried_from_both_sides():
    example = Example([torch.randn(2, 3, 8)])
    found = {each.label for each in variations(example, sizes={64}, numbers={1e3, 1e-12}, clamps=True)}
    assert {
        "64 in dimension 1",
        "65 in dimension 0",
        "of magnitude 4e+03",
        "of magnitude 1e-12",
        "with nan in it",
    } <= found


def test_special_values_are_left_out_where_nothing_clamps():
    example = Example([torch.randn(2, 3, 8)])
    found = {each.label for each in variations(example, sizes=(), numbers=(), clamps=False)}
    assert not any("nan" in label or "inf" in label for label in found)
