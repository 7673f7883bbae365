"""What `apply_all` does with norms, on each backend."""

import pytest
import torch
from support.norms import WIDTH, tensors
from support.thorough import thorough_on
from torch import nn

from fuseplug_rmsnorm.specimens import GatedSilu, GateFirst, Llama

pytestmark = pytest.mark.usefixtures("small_checks")


def test_norms_are_fused_and_undone(backend):
    backend.module("rmsnorm")
    model = nn.Sequential(Llama(WIDTH), nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)).to(backend.device)
    x = tensors()["x"].to(backend.device)
    before = model(x)
    applied = backend.manager("rmsnorm").apply_all(model)
    kernel_id = f"{backend.name}_fused_rmsnorm"
    assert [(entry.paths, entry.kernel_id, entry.variant, entry.check) for entry in applied.report.fused] == [
        (("0",), kernel_id, "llama", "passed"),
        (("1",), kernel_id, "torch", "passed"),
    ]
    backend.clear()
    torch.testing.assert_close(model(x), before)
    assert sum(backend.launches.values()) == 2
    applied.undo()
    assert torch.equal(model(x), before)


@thorough_on("triton")
@pytest.mark.parametrize("norm", [GateFirst, GatedSilu])
def test_gated_norms_are_fused(backend, norm):
    backend.module("rmsnorm")
    module = norm().to(backend.device)
    x, gate = torch.randn(2, 3, 5, 48).to(backend.device)
    before = module(x, gate)
    (entry,) = backend.manager("rmsnorm").apply_all(module).report.fused
    assert entry.check == "passed"
    backend.clear()
    torch.testing.assert_close(module(x, gate), before)
    assert backend.launches
