"""The inverse of a triangular matrix, as gated delta rules compute it on NPUs."""

import pytest
import torch
from support.ambient import default
from support.recurrences import DOUBLE

from fuseplug_gated_delta_rule.backends import npu


@pytest.mark.parametrize("rows", [16, 48, 64])
def test_the_inverse_is_as_exact_as_a_solver(rows):
    """Also for a matrix with large powers: 2 everywhere below the diagonal, as the same key again and again gives."""
    segment = object.__new__(npu.NpuSegment)
    segment.chunk = rows
    k = torch.nn.functional.normalize(torch.randn(3, 2, rows, 8), dim=-1)
    for system in (torch.full((1, 2, rows, rows), 2.0), 2 * k @ k.mT):
        system = system.tril(-1)
        exact = torch.linalg.inv(system.double() + torch.eye(rows, dtype=DOUBLE))
        solved = super(npu.NpuSegment, segment)._inverse(system)
        errors = [(x - exact).abs().max() for x in (segment._inverse(system), solved)]
        assert errors[0] <= 2 * errors[1] + 8 * torch.finfo(torch.float32).eps * exact.abs().max()


def test_the_inverse_does_not_depend_on_the_default_dtype():
    segment = object.__new__(npu.NpuSegment)
    segment.chunk = 16
    with default(torch.set_default_dtype, DOUBLE, torch.float32):
        assert segment._inverse(torch.ones(1, 2, 16, 16, dtype=torch.float32).tril(-1)).dtype is torch.float32
