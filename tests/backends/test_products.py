"""Products in half precision are computed in float32 where the CPU is slow at half precision."""

import pytest
import torch

from fuseplug import Use
from fuseplug_backends import products
from fuseplug_linear_cross_entropy.kernels import InductorLinearCrossEntropyKernel
from fuseplug_moe.kernels import InductorMoEKernel
from fuseplug_moe.recognise.stacked_experts import StackedAdapter


@pytest.fixture(autouse=True)
def a_cpu_with(monkeypatch):
    """Set the vector instructions that torch reports for this CPU; AVX2 at first."""

    def put(instructions):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)

    put("AVX2")
    return put


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 5, 7), (9, 40, 7), (17, 3, 33), (16, 16, 16), (5, 0, 3)])
def test_rounded_once_whatever_the_blocks(monkeypatch, dtype, autocast, transposed, rows, inner, columns):
    monkeypatch.setattr(products, "_BLOCK", 8)
    monkeypatch.setattr(products, "_ROWS", 1)
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype).t()
    if not transposed:
        a, b = a.t().contiguous().t(), b.contiguous()
    out = torch.full((2 * rows, columns), torch.nan, dtype=dtype)[::2]
    with torch.autocast("cpu", dtype, enabled=autocast):
        products.matmul(a, b, out)
    exact = a.double() @ b.double()
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


def test_only_where_it_is_faster(a_cpu_with):
    matrix = torch.zeros(64, 32, dtype=torch.bfloat16)
    few, many = matrix[:4, :32], matrix
    assert products.float32_is_faster(many, matrix.t())
    assert products.float32_is_faster(few, torch.zeros_like(matrix.t(), memory_format=torch.contiguous_format))
    assert not products.float32_is_faster(few, matrix.t())  # a few rows times a linear layer's weight
    assert not products.float32_is_faster(many.float(), matrix.t().float())
    assert not products.float32_is_faster(many.to("meta"), matrix.t().to("meta"))
    assert products.float32_is_faster(few, torch.zeros(3, 32, 8, dtype=torch.bfloat16))  # one of several matrices
    assert not products.float32_is_faster(few, torch.zeros(3, 8, 32, dtype=torch.bfloat16).mT)
    a_cpu_with("AVX512")
    assert not products.float32_is_faster(many, matrix.t())


def test_what_is_multiplied_so_is_never_multiplied_in_half_precision(monkeypatch):
    monkeypatch.setattr(torch, "mm", None)
    a, b = torch.ones(16, 4, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16)
    out = torch.empty(16, 8, dtype=torch.bfloat16)
    products.matmul(a, b, out)
    assert (out == 4).all()


@pytest.mark.parametrize("kernel", [InductorMoEKernel(), InductorLinearCrossEntropyKernel()])
@pytest.mark.parametrize("gradients", [False, True])
def test_smaller_calls_gain_there(a_cpu_with, kernel, gradients):
    def gains_from(dtype):
        return kernel.gains_from(Use(object.__new__(StackedAdapter), "cpu", dtype, gradients))

    assert gains_from(torch.bfloat16) < gains_from(torch.float32)
    a_cpu_with("AVX512")
    assert gains_from(torch.bfloat16) == gains_from(torch.float32)
