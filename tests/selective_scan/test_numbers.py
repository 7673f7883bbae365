"""Selective scans on each backend: what tests/recurrences does not check for all recurrences."""

import pytest
import torch
from support.scans import ROW, tensors


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "z"])
def test_what_is_not_finite_is_not_finite_where_the_references_is(backend, name, value):
    arguments = tensors()
    arguments[name].select(-1, 1)[0] = value
    results, expected = (function(**arguments) for function in ROW.both(backend.module("selective_scan")))
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
    assert not expected[0].isfinite().all()
