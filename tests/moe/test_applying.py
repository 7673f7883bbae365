"""What `apply_all` does with experts, on each backend."""

import pytest
import torch
from support.thorough import few_on

from fuseplug_moe.specimens import specimens

pytestmark = pytest.mark.usefixtures("small_checks")
MODULES = {type(module).__name__: module for module in specimens()}


@pytest.mark.parametrize("name", few_on("triton", ["StackedExperts", "InterleavedExperts", "SparseBlock"], 0))
def test_modules_are_fused_and_undone(backend, name):
    backend.module("moe")
    module = MODULES[name].to(backend.device)
    hidden = next(module.parameters()).shape[-1 if name != "InterleavedExperts" else 1]
    x = torch.randn(5, hidden, generator=torch.manual_seed(0)).to(backend.device)
    index, weights = torch.tensor([[0, 1]] * 5).to(backend.device), torch.rand(5, 2).to(backend.device)
    inputs = (x[None],) if name == "SparseBlock" else (x, index, weights)
    before = module(*inputs)
    applied = backend.manager("moe").apply_all(module)
    (entry,) = applied.report.fused
    assert entry.check == "passed"
    backend.clear()
    torch.testing.assert_close(module(*inputs), before, rtol=1e-4, atol=1e-5)
    assert backend.launches or backend.name == "inductor"  # Inductor has no program for some
    applied.undo()
    torch.testing.assert_close(module(*inputs), before, rtol=0, atol=0)
    module.cpu()
