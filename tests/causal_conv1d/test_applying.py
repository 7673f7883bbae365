"""What `apply_all` does with causal convolutions, on each backend."""

import pytest
import torch

from fuseplug.hookspecs import resolve
from fuseplug_causal_conv1d.kernels import CausalConv1dKernel

pytestmark = pytest.mark.usefixtures("small_checks")


@pytest.mark.parametrize("number", range(4))
def test_modules_are_fused_and_undone(backend, number):
    backend.module("causal_conv1d")
    torch.manual_seed(0)
    module = resolve(CausalConv1dKernel.specimens)()[number].to(backend.device)
    hidden = torch.randn(2, 9, 8).to(backend.device)
    before = module(hidden)
    with backend.manager("causal_conv1d").apply_all(module) as applied:
        assert [(entry.variant, entry.check) for entry in applied.report.fused] == [
            ("silu" if number < 2 else "identity", "passed")
        ], applied.report
        backend.clear()
        torch.testing.assert_close(module(hidden), before)
        assert backend.launches
    backend.clear()
    assert torch.equal(module(hidden), before)
    assert not backend.launches
