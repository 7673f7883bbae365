"""The kernel passes the conformance kit, and computes in a model to which it is applied."""

import torch
from fuseplug_layernorm.kernels import InductorLayernormKernel
from fuseplug_layernorm.specimens import specimens
from torch import nn

from fuseplug import KernelManager
from fuseplug_testing import check_kernel

DEVICE = "cpu"


def test_conformance():
    result = check_kernel(InductorLayernormKernel, device=DEVICE)
    assert result.passed["numbers"], result


def test_it_is_fused_in_a_model():
    model = nn.Sequential(nn.Linear(48, 48), specimens()[0], nn.Linear(48, 48)).to(DEVICE)
    x = torch.randn(4, 512, 48, device=DEVICE)
    expected = model(x)
    applied = KernelManager().apply("inductor_fused_layernorm", model, every_size=True)
    assert [entry.paths for entry in applied.report.fused] == [("1",)], applied.report
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    applied.undo()
    assert torch.equal(model(x), expected)
