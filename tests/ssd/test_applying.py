"""What apply_all makes of chunk scans, with each backend."""

from __future__ import annotations

import pytest
import torch
from support.thorough import first_quick

from fuseplug.hookspecs import resolve
from fuseplug_ssd.kernels import SSDKernel

pytestmark = pytest.mark.usefixtures("small_checks")


@pytest.mark.parametrize("number", first_quick([0, 1]))
def test_modules_are_fused_and_undone(backend, number):
    torch.manual_seed(0)
    module = resolve(SSDKernel.specimens)()[number].to(backend.device)
    hidden = torch.randn(2, 40, 8).to(backend.device)
    before = module(hidden)
    with backend.manager("ssd").apply_all(module) as applied:
        assert [(str(entry.target), entry.check) for entry in applied.report.fused] == [
            ("forward:chunk_scan", "passed")
        ], applied.report
        torch.testing.assert_close(module(hidden), before, rtol=1e-4, atol=1e-5)
        with torch.autocast(backend.device, torch.bfloat16):
            module(hidden).sum().backward()
        assert [(count.fused, count.original) for count in applied.calls()] == [(2, 0)]
    assert torch.equal(module(hidden), before)
