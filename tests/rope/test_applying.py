"""What `apply_all` does with rotations, on each backend."""

import pytest
import torch
from support.thorough import few_on

from fuseplug.hookspecs import resolve
from fuseplug_rope.kernels import RoPEKernel

pytestmark = pytest.mark.usefixtures("small_checks")


# One for each way in which an adapter calls the kernel: all others differ only in their numbers.
@pytest.mark.parametrize("name", few_on("triton", ["Half", "Complex", "OwnMethod"], 0))
def test_modules_are_fused_and_undone(backend, name):
    backend.module("rope")
    torch.manual_seed(0)
    module = next(module for module in resolve(RoPEKernel.specimens)() if type(module).__name__ == name)
    module.to(backend.device)
    hidden = torch.randn(2, 3, 8).to(backend.device)
    before = module(hidden)
    with backend.manager("rope").apply_all(module) as applied:
        assert [entry.check for entry in applied.report.fused] == ["passed"], applied.report
        backend.clear()
        torch.testing.assert_close(module(hidden), before)
        assert backend.launches
    backend.clear()
    torch.testing.assert_close(module(hidden), before, rtol=0, atol=0)
    assert not backend.launches
